// `html`: templates of the page as tagged template literals; and the hooks and signals that its components use.
import { h, Fragment } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { Fragment };
export { useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "@preact/signals";

// A diagram in Mermaid's language: drawn in a frame without an origin, with its code one click away. Code that cannot be drawn is shown,
// also that of a frame that says nothing, as one whose scripts did not come.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { CodeBlock } from "./code_block.js";

const FRAME = new URL("../../diagram.html", import.meta.url).pathname;
/** A higher one scrolls in its frame. */
const MAX_HEIGHT = 800;
/** After the frame is in sight. */
const SILENT_MILLISECONDS = 5000;
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

/** @param {{text: string, shown: string}} props `shown`: the text as it may be shown */
export function Diagram({ text, shown }) {
  const frame = useRef(/** @type {HTMLIFrameElement | null} */ (null));
  /** In pixels; 0 where it cannot be drawn, null before that is known. */
  const [height, setHeight] = useState(/** @type {number | null} */ (null));
  const [isCode, setCode] = useState(false);
  const [isSilent, setSilent] = useState(false);
  const draw = () => frame.current?.contentWindow?.postMessage({ text, isDark: isDark() }, "*");
  useEffect(() => {
    const onMessage = (/** @type {MessageEvent} */ { source, data }) => {
      if (source && source === frame.current?.contentWindow) setHeight(Math.min(Number(data.height) || 0, MAX_HEIGHT));
    };
    addEventListener("message", onMessage);
    let timer = 0;
    // The browser loads a frame that is far below only when it comes near.
    const sight = new IntersectionObserver((entries) => {
      if (!timer && entries.some(({ isIntersecting }) => isIntersecting)) timer = setTimeout(() => setSilent(true), SILENT_MILLISECONDS);
    });
    if (frame.current) sight.observe(frame.current);
    return () => {
      removeEventListener("message", onMessage);
      sight.disconnect();
      clearTimeout(timer);
    };
  }, []);
  const isShown = height && !isCode;
  return h("div", { class: "diagram" },
    (height === 0 || (height === null && isSilent)) && h("p", { class: "faint" }, "This diagram cannot be drawn."),
    height ? h("div", { class: "code-head" }, h("button", { class: "quiet", "aria-pressed": isCode, onClick: () => setCode(!isCode) }, "Show diagram code")) : null,
    // Before it is drawn it has to be there, without a height.
    height !== 0 && h("iframe", { ref: frame, src: FRAME, sandbox: "allow-scripts", loading: "lazy", title: "Diagram", onLoad: draw, height: height ?? 0, hidden: isCode, tabIndex: isShown ? 0 : -1 }),
    isShown ? null : h(CodeBlock, { text, shown, language: "mermaid" }),
  );
}

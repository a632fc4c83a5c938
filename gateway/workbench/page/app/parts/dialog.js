// Dialogs: the browser's own, which keep the focus inside and close by Escape.
import { html, useEffect, useRef, useState } from "./html.js";
import { ErrorNote } from "./widgets.js";

/** @param {{title: string, onClose: () => void, children?: any, isWide?: boolean}} props */
export function Dialog({ title, onClose, children, isWide = false }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const opener = document.activeElement;
    dialog.current?.showModal();
    // The browser gives the focus back to it only from a dialog that is closed before it is gone.
    return () => (opener instanceof HTMLElement ? opener.focus() : undefined);
  }, []);
  return html`<dialog ref=${dialog} class=${isWide ? "wide" : ""} aria-label=${title} onClose=${onClose}>
    <div class="row"><h2>${title}</h2><button class="quiet" aria-label="Close" onClick=${onClose}>×</button></div>
    ${children}
  </dialog>`;
}

/** Asks before something is done; its refusal is shown in the dialog.
 * @param {{title: string, text: any, action: string, isDangerous?: boolean, onDo: () => Promise<unknown>, onClose: () => void}} props */
export function Confirm({ title, text, action, isDangerous = false, onDo, onClose }) {
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    setBusy(true);
    try {
      await onDo();
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div>${text}</div>
    <${ErrorNote} error=${error} />
    <div class="buttons"><button onClick=${onClose}>Cancel</button>
      <button class=${isDangerous ? "main danger" : "main"} disabled=${isBusy} onClick=${act}>${action}</button></div>
  </${Dialog}>`;
}

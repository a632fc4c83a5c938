// Draws the one diagram of a frame. Mermaid needs inline styles and HTML from text, so the frame has a policy without them and no origin:
// what a diagram does there reaches neither the page nor its key, nor any host.
addEventListener("message", async ({ source, data: { text, isDark } }) => {
  if (source !== parent) return;
  const { mermaid } = /** @type {any} */ (globalThis);
  const box = document.createElement("div");
  box.textContent = text;
  document.body.replaceChildren(box);
  document.documentElement.style.background = isDark ? "#14171a" : "#fff";
  let height = 0;
  try {
    mermaid.initialize({
      startOnLoad: false, securityLevel: "strict", suppressErrorRendering: true, theme: isDark ? "dark" : "default", maxTextSize: 20_000, maxEdges: 300,
    });
    await mermaid.run({ nodes: [box] });
    height = document.documentElement.offsetHeight;
  } catch {
    // Without a height the page shows the code.
  }
  parent.postMessage({ height }, "*");
});

// Timelines in frames: as high as their content, in the colours that the reader has chosen for the book.
// A page opened from a disk instead of a server may not look into its frames: they keep the height of book.css, and the
// system's colours.

const frames = document.querySelectorAll("iframe.timeline");

function fit(frame) {
  const { body, defaultView } = frame.contentDocument;
  const resize = () => { frame.style.height = `${body.scrollHeight}px`; };
  new defaultView.ResizeObserver(resize).observe(body);
  resize();
}

/** Make a page dark or light, whatever the system prefers: its rules for dark systems apply always or never. */
function recolour({ body, documentElement: root, styleSheets }) {
  const dark = document.documentElement.dataset.theme === "dark";
  root.style.colorScheme = dark ? "dark" : "light";
  body.dataset.jpThemeLight = String(!dark); // the canvas reads what JupyterLab says
  for (const { cssRules } of styleSheets) {
    for (const { media } of cssRules) {
      if (media && /^(not all|all|\(prefers-color-scheme: dark\))$/.test(media.mediaText)) media.mediaText = dark ? "all" : "not all";
    }
  }
}

function loaded(frame) {
  if (!frame.contentDocument?.querySelector("main")) return; // not there yet, or none of our business
  fit(frame);
  recolour(frame.contentDocument);
}

for (const frame of frames) {
  frame.addEventListener("load", () => loaded(frame));
  if (frame.contentDocument?.readyState === "complete") loaded(frame);
}
const recolourAll = () => { for (const frame of frames) if (frame.contentDocument?.querySelector("main")) recolour(frame.contentDocument); };
new MutationObserver(recolourAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });

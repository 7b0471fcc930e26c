// What scrolls sideways is reached by Tab (WCAG 2.2, 2.1.1). Material wraps tables once the page is loaded.
const reach = () =>
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
addEventListener("load", reach);
addEventListener("resize", reach);

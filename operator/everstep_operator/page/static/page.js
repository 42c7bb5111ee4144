// What the page does beyond its HTML: it renews itself, and keeps where the reader is. Without this script it is whole.
"use strict";

(() => {
  const live = document.getElementById("live");
  const pause = document.getElementById("pause");
  if (!live || !window.htmx) return;

  let paused = false;
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
  });

  // A reader in the middle of a selection or of an open list is not disturbed.
  const busy = () => paused || document.hidden || !document.getSelection().isCollapsed;

  const renew = async () => {
    if (busy()) return;
    const scrolled = new Map([...document.querySelectorAll(".wide[id]")].map((each) => [each.id, each.scrollLeft]));
    const opened = new Set([...document.querySelectorAll("details[open][id]")].map((each) => each.id));
    try {
      await htmx.ajax("GET", location.pathname + location.search, { target: "#live", select: "#live", swap: "outerHTML" });
    } catch {
      return; // the next time it may answer
    }
    for (const [id, left] of scrolled) document.getElementById(id)?.scrollTo({ left, behavior: "instant" });
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  };

  setInterval(renew, Number(live.dataset.renew) * 1000);
})();

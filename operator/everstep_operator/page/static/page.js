// What the page does beyond its HTML: it renews itself, keeps where the reader is, and draws curves. Without this script
// all facts are there.
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

  // A reader in the middle of a selection is not disturbed.
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
    await curves();
  };

  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
  const section = document.getElementById("curves");
  const plots = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Seconds since the job began, as h:mm:ss.
  const clock = (seconds) => {
    const whole = Math.round(seconds);
    const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return parts.map((part, index) => (index ? String(part).padStart(2, "0") : String(part))).join(":");
  };

  // A line for each power of ten, and none between them.
  const decades = (_, __, low, high) => {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) powers.push(10 ** power);
    return powers;
  };

  const plot = (name, points, options) => {
    const data = [points.map(([at]) => at), points.map(([, value]) => value)];
    const known = plots.get(name);
    if (known) {
      known.setData(data);
      return;
    }
    const line = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--faint"), grid: line, ticks: line };
    const up = options.log
      ? { ...axis, size: 60, splits: decades, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(1)))) }
      : { ...axis, size: 60, space: 25, ...options.axis };
    const series = { label: name, stroke: colour(options.colour), width: 1.5, points: { show: false }, paths: options.paths };
    const figure = document.createElement("div");
    section.append(figure);
    const settings = {
      width: Math.max(240, section.clientWidth),
      height: options.height,
      scales: { x: { time: false }, y: { distr: options.log ? 3 : 1, range: options.range } },
      axes: [{ ...axis, incrs: SECONDS, values: (_, ticks) => ticks.map(clock) }, up],
      series: [{ label: "since its start", value: (_, at) => (at == null ? "" : clock(at)) }, series],
      cursor: { sync: { key: "job" } },
    };
    plots.set(name, new uPlot(settings, data, figure));
  };

  const curves = async () => {
    if (!section || !window.uPlot) return;
    const answer = await fetch(section.dataset.series, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const { seconds, world, loss } = await answer.json();
    if (!world.length) return;
    // The last size holds until now.
    const sizes = [...world, [seconds, world[world.length - 1][1]]];
    const most = Math.max(1, ...sizes.map(([, size]) => size));
    plot("world size", sizes, { colour: "--train", height: 130, paths: uPlot.paths.stepped({ align: 1 }), range: [0, most + 0.5], axis: { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] } });
    if (loss.length) {
      const positive = loss.every(([, value]) => value === null || value > 0);
      plot("loss", loss, { colour: "--ink", height: 240, log: positive });
    }
  };

  window.addEventListener("resize", () => {
    for (const each of plots.values()) each.setSize({ width: Math.max(240, section.clientWidth), height: each.height });
  });
  // Canvases know no style sheet: they are drawn anew in the other colours.
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const each of plots.values()) each.destroy();
    plots.clear();
    section?.replaceChildren();
    curves();
  });

  setInterval(renew, Number(live.dataset.renew) * 1000);
  curves();
})();

// SPDX-License-Identifier: Apache-2.0
// The page: requests the visible range at the resolution of the screen, follows the run, and draws.

import { Chart, FORMATS, MARGIN, color, compact, drawHeat, drawLines, drawStack, heatHeight, nearest, ramp } from "./charts.js";

const POLL = 250; // milliseconds between two questions for something new
const $ = (id) => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token");
const embedded = $("data"); // a report has its data inside, and asks for nothing
const query = (values) => new URLSearchParams(token ? { ...values, token } : values).toString();

const state = {
  data: null,
  mode: "all", // "all", {tail: steps} or {start, stop}
  hidden: new Set(), // runs that are not shown
  step: false, // the heat map shows the full step instead of a rank's own time
  hover: null,
  selection: null,
};

// ----------------------------------------------------------------------------------------------------------- elements

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A text whose parts between backticks are code.
function prose(text) {
  return text.split("`").map((part, i) => i % 2 ? element("code", {}, part) : part);
}

function swatch(name) {
  const made = element("span", { className: "swatch" });
  made.style.background = `var(${name})`;
  return made;
}

const runColor = (at) => `--run${at % 6}`;
const several = () => state.data.runs.length > 1;
const shownRuns = () => state.data.runs.map((run, at) => ({ run, at })).filter(({ at }) => !state.hidden.has(at));

// --------------------------------------------------------------------------------------------------------------- data

function unpacked(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  return JSON.parse(text, (key, value) => value !== null && typeof value === "object" && Array.isArray(value.shape)
    ? new Float32Array(buffer, 4 + length + 4 * value.at, value.shape.reduce((product, size) => product * size, 1)) : value);
}

const hasSteps = () => state.data?.runs.some((run) => !run.empty);

function extent() {
  const runs = state.data.runs.filter((run) => !run.empty);
  return [Math.min(...runs.map((run) => run.first)), Math.max(...runs.map((run) => run.last))];
}

function range() {
  const [first, last] = extent();
  // Few steps are wide: the axis has space for all of the first and the last.
  if (state.mode === "all") return last - first < 20 ? [first - 0.5, last + 0.5] : [first, last];
  if (state.mode.tail) return [Math.max(first, last - state.mode.tail + 1), last];
  return [state.mode.start, state.mode.stop];
}

let requested = 0, pending = null, failures = 0;

async function fetchView(again) {
  // `again`: another range or size is shown, so that an equal version means nothing.
  if (embedded || (pending && !again)) return;
  if (pending) pending.abort();
  const control = pending = new AbortController(), number = ++requested;
  const values = { pixels: Math.max(100, Math.round($("charts").clientWidth - MARGIN.left)) };
  if (state.mode !== "all" && hasSteps()) {
    const [start, stop] = range();
    values.start = Math.max(1, Math.floor(start));
    if (!state.mode.tail) values.stop = Math.max(values.start, Math.ceil(stop));
  }
  if (state.data && !again) values.version = state.data.version;
  try {
    const answer = await fetch("api/view?" + query(values), { signal: control.signal, cache: "no-store" });
    failures = 0;
    if (answer.status === 200) {
      const data = unpacked(await answer.arrayBuffer());
      if (number === requested) {
        state.data = data;
        render();
      }
    } else if (answer.status !== 204) problem((await answer.text()).trim());
    if (answer.ok) problem(null);
  } catch (error) {
    if (error.name !== "AbortError" && ++failures > 1)
      problem("The monitor cannot be reached: it has ended, or the connection is lost. Trying again.");
  } finally {
    if (pending === control) pending = null;
  }
}

function problem(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text || "";
}

async function follow() {
  if (embedded) {
    state.data = unpacked(Uint8Array.from(atob(embedded.textContent), (letter) => letter.charCodeAt(0)).buffer);
    document.querySelector("h1 span").textContent = "report";
    render();
    return;
  }
  const begin = performance.now();
  if (!document.hidden) await fetchView(false);
  if (state.data) status();
  setTimeout(follow, Math.max(POLL, 2 * (performance.now() - begin)));
}

let later = null;
function changed() {
  // Draws what is there at once; the finer picture follows.
  draw();
  clearTimeout(later);
  later = setTimeout(() => fetchView(true), 60);
  $("all").ariaPressed = state.mode === "all";
  $("tail").ariaPressed = Boolean(state.mode.tail);
}

// -------------------------------------------------------------------------------------------------------------- range

function show(start, stop) {
  if (!hasSteps()) return;
  const [first, last] = extent(), least = Math.min(8, Math.max(1, last - first));
  if (stop - start < least) { const middle = (start + stop) / 2; [start, stop] = [middle - least / 2, middle + least / 2]; }
  if (stop - start >= last - first) state.mode = "all";
  else {
    const shift = Math.max(0, first - start) - Math.max(0, stop - last);
    state.mode = { start: start + shift, stop: stop + shift };
  }
  changed();
}

function zoom(factor, around) {
  if (!hasSteps()) return;
  const [start, stop] = range(), at = around ?? (start + stop) / 2;
  show(at - (at - start) * factor, at + (stop - at) * factor);
}

function move(part) {
  if (!hasSteps()) return;
  const [start, stop] = range(), by = (stop - start) * part;
  show(start + by, stop + by);
}

$("in").onclick = () => zoom(0.5);
$("out").onclick = () => zoom(2);
$("earlier").onclick = () => move(-0.5);
$("later").onclick = () => move(0.5);
$("all").onclick = () => { state.mode = "all"; changed(); };
$("tail").onclick = () => {
  if (!hasSteps()) return;
  const [first, last] = extent();
  state.mode = { tail: Math.max(50, Math.min(1000, Math.round((last - first) / 10))) };
  changed();
};

function listen(chart) {
  const { canvas } = chart, touches = new Map();
  let from = null, pinch = null;
  const at = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, at(event));
    if (touches.size === 2) pinch = { xs: [...touches.values()], range: range() };
    else if (event.pointerType === "mouse" && event.button === 0) {
      from = chart.step(at(event));
      canvas.setPointerCapture(event.pointerId);
    }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (touches.has(event.pointerId)) touches.set(event.pointerId, at(event));
    if (pinch && touches.size === 2) {
      const now = [...touches.values()], was = pinch.xs, [start, stop] = pinch.range;
      const factor = Math.abs(was[1] - was[0]) / Math.max(10, Math.abs(now[1] - now[0]));
      const space = chart.width - chart.left - MARGIN.right, middle = (was[0] + was[1]) / 2 - chart.left;
      const held = start + middle / space * (stop - start), length = (stop - start) * factor;
      const begin = held - ((now[0] + now[1]) / 2 - chart.left) / space * length;
      show(begin, begin + length);
      return;
    }
    if (from !== null) state.selection = [from, chart.step(at(event))];
    state.hover = chart.step(at(event));
    drawSoon();
    tip(chart, event);
  });
  const end = (event) => {
    touches.delete(event.pointerId);
    if (touches.size < 2) pinch = null;
    if (from === null) return;
    const selection = state.selection;
    from = state.selection = null;
    if (selection && Math.abs(chart.x(selection[1]) - chart.x(selection[0])) > 5) show(Math.min(...selection), Math.max(...selection));
    else drawSoon();
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => { state.hover = null; $("tip").hidden = true; drawSoon(); });
  canvas.addEventListener("dblclick", () => { state.mode = "all"; changed(); });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.003), chart.step(at(event)));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 1000);
    else return;
    event.preventDefault();
  }, { passive: false });
}

function tip(chart, event) {
  const lines = chart.tip ? chart.tip(state.hover, event) : [], box = $("tip");
  box.hidden = !lines.length;
  if (!lines.length) return;
  box.replaceChildren(...lines.map(([name, value, paint], i) => element("div", { className: i ? "" : "title" },
    element("span", {}, ...(paint ? [swatch(paint)] : []), name), element("span", {}, value))));
  const side = event.clientX + 16 + box.offsetWidth > innerWidth ? event.clientX - 16 - box.offsetWidth : event.clientX + 16;
  box.style.left = Math.max(4, side) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6) + "px";
}

// -------------------------------------------------------------------------------------------------------------- cards

const cards = new Map(); // key -> {card, chart, draw}

function card(key, title, unit, height, options = {}) {
  let found = cards.get(key);
  if (!found) {
    const canvas = element("canvas", { role: "img" });
    const now = element("span", { className: "now" }), unitText = element("span", { className: "unit" });
    const legend = element("div", { className: "legend" });
    const head = element("div", { className: "head" }, element("h2", {}, title), unitText, legend, now);
    const box = element("div", { className: "card" + (options.wide ? " wide" : "") }, head, canvas);
    const chart = new Chart(canvas, height);
    found = { box, head, now, unitText, legend, chart, canvas };
    cards.set(key, found);
    if (options.made) options.made(found);
    listen(chart);
  }
  found.unitText.textContent = unit;
  found.used = true;
  return found;
}

const CURVES = [
  ["loss", "Loss", "", "number"],
  ["learning_rate", "Learning rate", "", "number", { zero: true, band: false }],
  ["gradient_norm", "Gradient norm", "", "number"],
  ["throughput", "Throughput", "", "number", { zero: true, band: false }],
];
const STOPPED = new Set(["hang", "memory"]); // verdicts on a run that makes no more steps, as in `verdict.py`
const SLOW = /^Ranks? \d/; // how sentences about what stands out begin, as in `sentences.py`
const PHASES = ["data", "transfer", "forward", "backward", "communication", "optimizer", "checkpoint", "other"];

const hasValues = (values) => values && values.some((value) => !Number.isNaN(value));

function lineCard(key, title, unit, format, options, pick) {
  const lines = shownRuns().map(({ run, at }) => ({ run, at, found: pick(run) })).filter(({ found }) => found && (unit === "logged" || hasValues(found.mean)));
  if (!lines.length) return;
  const made = card(key, title, unit, 190);
  const ready = lines.map(({ run, at, found }) => ({ ...found, x: found.x || run.x, paint: runColor(at), name: run.name }));
  const newest = ready.map((line) => last(line.mean));
  made.now.textContent = several() ? "" : format(newest[0]);
  made.canvas.ariaLabel = `${title}: ` + ready.map((line, i) => `${several() ? line.name + " " : ""}${format(newest[i])}`).join(", ");
  made.draw = () => drawLines(made.chart, range(), ready.map((line) => ({ ...line, color: color(line.paint) })),
    { format, selection: state.selection, ...options });
  made.chart.tip = (step) => [[`step ${FORMATS.step(step)}`, ""], ...ready.map((line) => {
    const i = nearest(line.x, step), spread = options.band !== false && line.high[i] > line.low[i];
    const text = format(line.mean[i]) + (spread ? `  (${format(line.low[i])} – ${format(line.high[i])})` : "");
    return [several() ? line.name : "mean" , text, line.paint];
  })];
}

function heatCard({ run, at }) {
  if (!run.rows.length) return;
  const which = state.step ? run.step : run.own;
  if (!hasValues(which)) return;
  const title = several() ? `Step time of each rank: ${run.name}` : "Step time of each rank";
  const made = card(`heat${at}`, title, "", 100, {
    wide: true,
    made: (found) => {
      const button = element("button", { type: "button" });
      button.onclick = () => { state.step = !state.step; render(); };
      found.head.append(button);
      found.button = button;
      found.scale = element("span", { className: "unit" });
      found.legend.append(found.scale);
    },
  });
  made.unitText.textContent = state.step ? "full step" : "without communication and waiting";
  made.button.textContent = state.step ? "Show own time" : "Show full step";
  made.chart.height = heatHeight(run.rows.length);
  const slow = run.summary.stragglers.map(({ rank }) => rank);
  made.canvas.ariaLabel = `${title}. ` + (slow.length ? `Slow ranks: ${slow.join(", ")}` : "No rank is slow");
  made.draw = () => {
    drawHeat(made.chart, range(), run.x, run.rows, which, run.slow, slow, { selection: state.selection });
    const [low, high] = made.chart.limits;
    const bar = element("span", { className: "swatch" });
    bar.style.cssText = `width:70px;height:9px;margin:0 6px;background:linear-gradient(90deg,${[0, 0.25, 0.5, 0.75, 1].map((part) => `rgb(${ramp(part)})`).join()})`;
    made.scale.replaceChildren(FORMATS.seconds(low), bar, FORMATS.seconds(high), 
      ...(slow.length ? ["   ▲ slow rank"] : []), ...(run.slow.some(Boolean) ? ["  ", swatch("--slow"), "slow steps"] : []));
  };
  made.chart.tip = (step, event) => {
    const i = nearest(run.x, step), space = made.chart.height - MARGIN.top - MARGIN.bottom;
    const y = event.clientY - made.canvas.getBoundingClientRect().top - MARGIN.top;
    const row = Math.min(run.rows.length - 1, Math.max(0, Math.floor(y / space * run.rows.length))), place = row * run.x.length + i;
    const [first, last] = run.rows[row], host = run.ranks.find(({ rank }) => rank === first)?.host;
    return [[`rank ${first === last ? first : `${first}–${last}`}${host ? ` on ${host}` : ""}`, `step ${FORMATS.step(step)}`],
      ["own time", FORMATS.seconds(run.own[place])], ["full step", FORMATS.seconds(run.step[place])],
      ...(run.slow[place] ? [["slow: above the median of ranks", ""]] : [])];
  };
}

function phaseCard({ run, at }) {
  const phases = PHASES.filter((part) => run.phases[part] && run.phases[part].some((value) => value > 0));
  if (!phases.length) return;
  const title = several() ? `Phases of a step: ${run.name}` : "Phases of a step";
  const made = card(`phases${at}`, title, "mean over ranks", 220, { wide: true });
  made.legend.replaceChildren(...phases.map((part) => element("span", {}, swatch(`--${part}`), part)));
  made.canvas.ariaLabel = `${title}: ` + run.summary.sentences.slice(1, 2).join(" ");
  made.draw = () => drawStack(made.chart, range(), run.x, phases.map((part) => ({ values: run.phases[part], color: color(`--${part}`) })),
    { format: FORMATS.seconds, selection: state.selection });
  made.chart.tip = (step) => {
    const i = nearest(run.x, step), whole = phases.reduce((sum, part) => sum + run.phases[part][i], 0);
    return [[`step ${FORMATS.step(step)}`, FORMATS.seconds(whole)],
      ...[...phases].reverse().map((part) => [part, FORMATS.seconds(run.phases[part][i]), `--${part}`])];
  };
}

function render() {
  const { runs } = state.data;
  document.title = `${runs.map((run) => run.name).join(", ")} – accelerate ${embedded ? "report" : "monitor"}`;
  status();
  overview();
  findings();
  for (const made of cards.values()) made.used = false;
  const full = runs.some((run) => !run.empty);
  if (full) {
    const units = new Set(shownRuns().map(({ run }) => run.unit));
    for (const [key, title, unit, format, options = {}] of CURVES)
      lineCard(key, title, key === "throughput" ? `${[...units].join(", ")} / s, all ranks` : unit, FORMATS[format], options,
        (run) => run.curves[key]);
    const names = [...new Set(shownRuns().flatMap(({ run }) => Object.keys(run.logged)))].sort();
    for (const name of names.slice(0, 60)) lineCard(`logged ${name}`, name, "logged", FORMATS.number, {}, (run) => run.logged[name]);
    lineCard("seconds", "Step time", "all ranks", FORMATS.seconds, { zero: true, peaks: true }, (run) => run.curves.seconds);
    lineCard("device_memory", "Device memory", "allocated, all ranks", FORMATS.bytes, { zero: true }, (run) => run.curves.device_memory);
    lineCard("host_memory", "Host memory", "resident, all ranks", FORMATS.bytes, { zero: true }, (run) => run.curves.host_memory);
    shownRuns().forEach(heatCard);
    shownRuns().forEach(phaseCard);
    events();
  }
  const boxes = [];
  for (const [key, made] of cards) if (made.used) boxes.push(made.box); else cards.delete(key);
  // Wide cards come after the others, so that the grid has no holes.
  boxes.sort((a, b) => a.classList.contains("wide") - b.classList.contains("wide"));
  const present = [...$("charts").children];
  if (present.length !== boxes.length || present.some((box, i) => box !== boxes[i])) $("charts").replaceChildren(...boxes);
  if (full) draw();
}

// The last of the narrow cards fills its row.
function arrange() {
  const columns = getComputedStyle($("charts")).gridTemplateColumns.split(" ").length;
  const narrow = [...$("charts").children].filter((box) => !box.classList.contains("wide"));
  const free = (columns - narrow.length % columns) % columns;
  for (const box of narrow) box.style.gridColumn = "";
  if (free && narrow.length) narrow.at(-1).style.gridColumn = `span ${free + 1}`;
}

function draw() {
  if (!state.data) return;
  arrange();
  for (const made of cards.values())
    if (made.draw) {
      made.chart.hover = state.hover;
      made.draw();
    }
}

let frame = null;
function drawSoon() {
  frame ??= requestAnimationFrame(() => { frame = null; draw(); });
}

function ago(seconds) {
  return seconds < 1.5 ? "now" : seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago`
    : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

function runState(run) {
  if (run.empty) return "waiting for the first step";
  if (embedded) return `${run.ended ? "ended" : "not ended"}, last step ${new Date(run.time * 1000).toLocaleString()}, ${run.folder}`;
  if (run.ended) return "ended";
  const age = run.time ? Date.now() / 1000 - run.time : NaN;
  return Number.isFinite(age) ? `last step ${ago(Math.max(0, age))}` : "";
}

function status() {
  const { runs } = state.data, box = $("status");
  const live = !embedded && runs.some((run) => !run.ended && run.time && Date.now() / 1000 - run.time < 60);
  box.className = live ? "live" : "";
  const text = several() ? `${runs.length} runs` : `${runs[0].name} · ${runState(runs[0])}`;
  if (box.textContent !== text) box.textContent = text;
  if (several()) runs.forEach((run, at) => { const cell = $(`state${at}`); if (cell) cell.textContent = runState(run); });
}

function last(values) {
  return values?.findLast((value) => !Number.isNaN(value)) ?? NaN;
}

function tile(title, value, className = "") {
  return element("div", { className: `card tile ${className}` }, element("small", {}, title), element("b", {}, value));
}

const goodputText = (run) => run.summary.goodput ? `${(run.summary.goodput.share * 100).toFixed(1)}%` : "–";

function slowText(run) {
  const ranks = run.summary.stragglers.map(({ rank }) => rank);
  const names = ranks.slice(0, 3).join(", ") + (ranks.length > 3 ? ` + ${ranks.length - 3}` : "");
  return ranks.length ? `rank${ranks.length > 1 ? "s" : ""} ${names}` : "none";
}

function overview() {
  const { runs } = state.data;
  if (!several()) {
    const run = runs[0];
    if (run.empty) {
      $("runs").replaceChildren(element("div", { className: "card empty" },
        `Waiting for the first step of ${run.name}. It is shown as soon as it is written to ${run.folder}.`));
      return;
    }
    const slow = run.summary.stragglers.length > 0;
    $("runs").replaceChildren(element("div", { className: "tiles" },
      tile("Step", FORMATS.step(run.last)),
      ...(hasValues(run.curves.loss.mean) ? [tile("Loss", compact(last(run.curves.loss.mean)))] : []),
      ...(run.summary.seconds ? [tile("Mean step", FORMATS.seconds(run.summary.seconds))] : []),
      ...(run.summary.throughput ? [tile(`${run.unit} / s`, compact(run.summary.throughput, 3))] : []),
      ...(run.summary.utilization ? [tile("Utilization (MFU)", `${(run.summary.utilization * 100).toFixed(1)}%`)] : []),
      ...(run.summary.goodput ? [tile("Goodput", goodputText(run))] : []),
      ...(run.summary.memory.device ? [tile("Device memory", FORMATS.bytes(run.summary.memory.device))]
        : run.summary.memory.host ? [tile("Host memory", FORMATS.bytes(run.summary.memory.host))] : []),
      ...(run.ranks.length > 1 ? [tile("Slow ranks", slowText(run), slow ? "slow" : "")] : []),
      ...(run.summary.skipped ? [tile("Skipped steps", FORMATS.step(run.summary.skipped))] : [])));
    return;
  }
  const names = ["Run", "State", "Step", "Loss", "Step time", "Throughput", "Ranks", "Slow ranks", "Goodput"];
  const body = runs.map((run, at) => {
    const box = element("input", { type: "checkbox", checked: !state.hidden.has(at) });
    box.onchange = () => { if (box.checked) state.hidden.delete(at); else state.hidden.add(at); render(); };
    const cells = [element("label", {}, box, " ", swatch(runColor(at)), run.name), runState(run), FORMATS.step(run.last),
      compact(last(run.curves.loss?.mean)), FORMATS.seconds(run.summary.seconds ?? NaN),
      run.summary.throughput ? `${compact(run.summary.throughput, 3)} ${run.unit}/s` : "–", String(run.ranks.length), slowText(run), goodputText(run)];
    return element("tr", {}, ...cells.map((cell, i) => element("td", { className: i === 7 && run.summary.stragglers.length ? "slow" : "", id: i === 1 ? `state${at}` : "", "data-name": names[i] }, cell)));
  });
  if ($("runs").contains(document.activeElement)) return; // a click would be lost
  $("runs").replaceChildren(element("div", { className: "card scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))), element("tbody", {}, ...body))));
}

function findings() {
  const items = [], verdicts = [];
  for (const { run } of shownRuns()) {
    const lead = several() ? `${run.name}: ` : "";
    for (const note of run.notes) items.push(element("li", { className: "slow" }, lead, ...prose(note)));
    const { limit, headline, evidence, next_step } = run.summary.verdict;
    if ((run.empty || !run.ranks.length) && !STOPPED.has(limit)) continue;
    verdicts.push(element("dl", { className: STOPPED.has(limit) ? "stopped" : "" },
      ...[["Verdict", lead + headline], ["Evidence", evidence], ["Next step", next_step]].flatMap(([name, text]) =>
        [element("dt", {}, name), element("dd", {}, ...prose(text))])));
    if (run.empty) continue;
    const others = run.summary.sentences.filter((text) => text !== evidence);
    for (const sentence of others.filter((text) => !several() || /^Steps? \d.* took /.test(text) || SLOW.test(text)))
      items.push(element("li", { className: SLOW.test(sentence) ? "slow" : "" }, lead, ...prose(sentence)));
    for (const advice of run.summary.advice) items.push(element("li", { className: "try" }, `${lead}Try: `, ...prose(advice)));
  }
  const text = [...verdicts, ...items].map((item) => item.textContent).join("\n");
  if ($("findings").dataset.text === text) return;
  $("findings").dataset.text = text;
  const title = element("h2", {}, embedded ? "Summary" : "Summary of the steps shown");
  $("findings").replaceChildren(...(text ? [element("div", { className: "card" }, title, ...verdicts, element("ul", {}, ...items))] : []));
}

const ALARMS = new Set(["out_of_memory", "hang", "warning"]);

function rankText(ranks, count) {
  return ranks.length === count && count > 1 ? "all ranks" : ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${[...ranks].sort((a, b) => a - b).join(", ")}`;
}

function events() {
  const all = shownRuns().flatMap(({ run, at }) => run.events.map((event) => ({ event, run, at })));
  if (!all.length) return;
  all.sort((a, b) => b.event.time - a.event.time);
  let made = cards.get("events");
  if (!made) {
    const table = element("table"), list = element("div", { id: "events" }, table);
    made = { box: element("div", { className: "card wide" }, element("div", { className: "head" }, element("h2", {}, "Events")), list), table };
    cards.set("events", made);
  }
  made.used = true;
  const text = JSON.stringify(all.map(({ event }) => event)) + [...state.hidden];
  if (made.text === text) return;
  made.text = text;
  made.table.replaceChildren(...all.slice(0, 400).map(({ event, run, at }) => {
    const facts = [];
    if (event.step !== undefined) facts.push(`step ${FORMATS.step(event.step)}`);
    if (event.seconds !== undefined) facts.push(FORMATS.seconds(event.seconds));
    if (event.restart) facts.push(`restart ${event.restart}`);
    const rest = element("td", {}, facts.join(", "));
    const named = event.path && event.message?.endsWith(event.path); // the link stands for it
    const message = named ? event.message.slice(0, -event.path.length) : event.message;
    if (message) rest.append(facts.length ? ": " : "", ...prose(message));
    if (event.path) {
      const where = event.file ? element("a", { href: embedded ? event.file : `file/${at}/${event.path.split("/").map(encodeURIComponent).join("/")}?${query({})}` }, event.path) : event.path;
      rest.append(named ? "" : facts.length || message ? ": " : "", where);
    }
    return element("tr", {}, element("td", {}, new Date(event.time * 1000).toLocaleString()),
      element("td", {}, ...(several() ? [swatch(runColor(at))] : []), rankText(event.ranks, run.ranks.length)),
      element("td", { className: ALARMS.has(event.event) ? "alarm" : "" }, event.event.replaceAll("_", " ")), rest);
  }));
}

// -------------------------------------------------------------------------------------------------------------- theme

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  let chosen = null;
  try { chosen = localStorage.getItem("accelerate-theme"); } catch { /* storage is off: the system's choice */ }
  document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  draw();
}
$("theme").onclick = () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("accelerate-theme", next); } catch { /* as above */ }
  document.documentElement.dataset.theme = next;
  draw();
};
dark.addEventListener("change", theme);

let resizing = null;
new ResizeObserver(() => {
  draw();
  clearTimeout(resizing);
  resizing = setTimeout(() => state.data && fetchView(true), 150);
}).observe($("charts"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) fetchView(false); });
theme();
follow();

// SPDX-License-Identifier: Apache-2.0
// Drawing on canvases: curves, stacked areas and a heat map over the same axis of steps.

export const MARGIN = { left: 58, right: 10, top: 6, bottom: 22 };
// cividis: equally legible with all kinds of colour vision.
const RAMP = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116],
  [195, 179, 105], [225, 204, 85], [254, 232, 56]];

export function ramp(part) {
  const at = Math.min(Math.max(part, 0), 1) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)));
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------------------------------------------------- numbers

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export function compact(value, digits = 4) {
  if (!Number.isFinite(value)) return Number.isNaN(value) || value === null ? "–" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.0009999 || size >= 1e15)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return trimmed(value / (unit === "k" ? 1e3 : limit), digits) + unit;
  return trimmed(value, digits);
}

const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const byteUnit = (value) => BYTES.find(([, size]) => value >= size) || BYTES.at(-1);

export const FORMATS = {
  number: compact,
  step: (value) => Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : "–",
  seconds: (value, digits = 3) => !Number.isFinite(value) ? "–" : value === 0 ? "0"
    : value < 1e-3 ? trimmed(value * 1e6, digits) + " µs" : value < 1 ? trimmed(value * 1e3, digits) + " ms"
    : trimmed(value, digits) + " s",
  bytes: (value, digits = 3, [name, size] = byteUnit(value)) => !Number.isFinite(value) ? "–" : value === 0 ? "0"
    : `${trimmed(value / size, digits)} ${name}`,
};

export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / count));
  const unit = power * ([1, 2, 5, 10].find((step) => span / (power * step) <= count) || 10);
  const found = [];
  for (let at = Math.ceil(low / unit - 1e-9); at * unit <= high + unit * 1e-9; at++) found.push(at * unit);
  return found;
}

// The values of an axis and their labels. Those of bytes are round in one unit.
export function labels(low, high, count, format) {
  const unit = format === FORMATS.bytes ? byteUnit(high) : ["", 1];
  const values = ticks(low / unit[1], high / unit[1], count).map((value) => value * unit[1]), digits = digitsFor(values);
  return values.map((value) => [value, format(value, digits, unit)]);
}

function digitsFor(values) {
  if (values.length < 2) return 3;
  const step = Math.abs(values[1] - values[0]), most = Math.max(...values.map(Math.abs));
  return Math.max(1, Math.ceil(Math.log10(most / step) - 1e-9) + 1);
}

function quantile(values, part) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] : NaN;
}

// The end of an axis for durations: a few very long ones, such as a first step, do not flatten the rest.
function withoutPeaks(values, high) {
  const known = values.filter(Number.isFinite).sort((a, b) => a - b);
  const usual = known[Math.floor(0.9 * (known.length - 1))];
  return known.length >= 5 && high > 3 * usual && usual > 0 ? 1.5 * usual : high;
}

// ------------------------------------------------------------------------------------------------------------ canvas

export class Chart {
  // `canvas` is drawn for the steps `range()` = [start, stop].
  constructor(canvas, height) {
    this.canvas = canvas;
    this.height = height;
    this.left = MARGIN.left;
    this.hover = null;
  }

  begin(range) {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = this.height + "px";
    }
    this.range = range;
    this.width = width;
    const context = this.context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    return context;
  }

  x(step) {
    const [start, stop] = this.range;
    return this.left + (step - start) / Math.max(stop - start, 1) * (this.width - this.left - MARGIN.right);
  }

  step(x) {
    const [start, stop] = this.range;
    return start + (x - this.left) / (this.width - this.left - MARGIN.right) * Math.max(stop - start, 1);
  }

  y(value) {
    const [low, high] = this.scale, space = this.height - MARGIN.top - MARGIN.bottom;
    return MARGIN.top + (1 - (value - low) / (high - low)) * space;
  }

  axes(format) {
    const context = this.context;
    context.strokeStyle = color("--grid");
    context.fillStyle = color("--soft");
    context.lineWidth = 1;
    if (format) {
      context.textAlign = "right";
      context.textBaseline = "middle";
      for (const [value, label] of labels(this.scale[0], this.scale[1], Math.max(2, this.height / 38), format)) {
        const y = Math.round(this.y(value)) + 0.5;
        context.beginPath();
        context.moveTo(this.left, y);
        context.lineTo(this.width - MARGIN.right, y);
        context.stroke();
        context.fillText(label, this.left - 7, y);
      }
    }
    this.stepAxis();
  }

  stepAxis() {
    const context = this.context;
    context.fillStyle = color("--soft");
    context.textBaseline = "alphabetic";
    context.textAlign = "right";
    context.fillText("step", this.left - 7, this.height - 5);
    const values = ticks(this.range[0], this.range[1], Math.max(2, (this.width - this.left) / 75)).filter(Number.isInteger);
    const digits = digitsFor(values);
    for (const value of values) {
      const x = this.x(value), text = value >= 1e5 ? compact(value, digits) : FORMATS.step(value);
      const half = context.measureText(text).width / 2;
      context.textAlign = x + half > this.width - 2 ? "right" : x - half < this.left - 4 ? "left" : "center";
      context.fillText(text, context.textAlign === "right" ? this.width - 2 : x, this.height - 5);
    }
  }

  clip() {
    this.context.save();
    this.context.beginPath();
    this.context.rect(this.left, MARGIN.top - 2, this.width - this.left - MARGIN.right + 2, this.height - MARGIN.top - MARGIN.bottom + 3);
    this.context.clip();
  }

  end(selection) {
    const context = this.context;
    if (selection) {
      const [from, to] = selection.map((step) => this.x(step));
      context.fillStyle = color("--accent");
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(from, to), MARGIN.top, Math.abs(to - from), this.height - MARGIN.top - MARGIN.bottom);
      context.globalAlpha = 1;
    }
    if (this.hover !== null && this.hover >= this.range[0] && this.hover <= this.range[1]) {
      const x = Math.round(this.x(this.hover)) + 0.5;
      context.strokeStyle = color("--soft");
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(x, MARGIN.top);
      context.lineTo(x, this.height - MARGIN.bottom);
      context.stroke();
      context.setLineDash([]);
    }
  }
}

export function visible(xs, [start, stop]) {
  let from = 0, to = xs.length;
  while (from < xs.length - 1 && xs[from + 1] < start) from++;
  while (to > 1 && xs[to - 2] > stop) to--;
  return [from, to];
}

export function nearest(xs, step) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - step) <= Math.abs(xs[high] - step) ? low : high;
}

// One point for each pixel at most: neighbours are merged to their mean and their extremes.
function coarser(line, range, pixels) {
  const [from, to] = visible(line.x, range), size = Math.ceil((to - from) / pixels);
  if (size < 2) return line;
  const begin = from - from % size, count = Math.ceil((to - begin) / size), found = { ...line };
  for (const name of ["x", "mean", "low", "high"]) found[name] = new Float32Array(count).fill(NaN);
  for (let k = 0; k < count; k++) {
    let sum = 0, known = 0, place = 0, members = 0, low = Infinity, high = -Infinity;
    for (let i = begin + k * size; i < Math.min(begin + (k + 1) * size, line.x.length); i++) {
      place += line.x[i];
      members++;
      if (!Number.isNaN(line.mean[i])) { sum += line.mean[i]; known++; }
      if (line.low[i] < low) low = line.low[i];
      if (line.high[i] > high) high = line.high[i];
    }
    found.x[k] = place / members;
    if (known) [found.mean[k], found.low[k], found.high[k]] = [sum / known, low, high];
  }
  return found;
}

// lines: [{x, mean, low, high, color}]; zero: the axis begins at 0; band: whether extremes are drawn behind the line;
// peaks: rare high values may leave the picture even if there are few values.
export function drawLines(chart, range, lines, { format, zero = false, band = true, peaks = false, selection = null }) {
  const context = chart.begin(range), inside = [], extremes = [];
  lines = lines.map((line) => coarser(line, range, (chart.width - chart.left - MARGIN.right) / 1.5));
  for (const line of lines) {
    const [from, to] = visible(line.x, range);
    for (let i = from; i < to; i++) {
      if (Number.isFinite(line.mean[i])) inside.push(line.mean[i]);
      if (band && Number.isFinite(line.high[i])) extremes.push(line.high[i]);
      if (band && Number.isFinite(line.low[i])) extremes.push(line.low[i]);
    }
  }
  // Rare peaks (a first step, a save) do not flatten the rest: they leave the picture.
  let low = Math.min(quantile(inside, 0.005), band && extremes.length ? quantile(extremes, 0.01) : Infinity);
  let high = Math.max(quantile(inside, 0.995), band && extremes.length ? quantile(extremes, 0.985) : -Infinity);
  if (peaks) high = withoutPeaks(inside, high);
  const empty = !Number.isFinite(low);
  if (empty) [low, high] = [0, 1];
  if (zero) low = Math.min(0, low);
  if (high - low < Math.abs(high) * 1e-4 || high === low) {
    const around = Math.abs(high) * 0.05 || 1;
    [low, high] = [zero ? low : low - around, high + around];
  }
  const pad = (high - low) * 0.05;
  chart.scale = [zero && low === 0 ? 0 : low - pad, high + pad];
  chart.axes(empty ? null : format);
  if (empty) {
    context.textAlign = "center";
    context.fillText("no finite value in these steps", (chart.left + chart.width) / 2, chart.height / 2);
  }
  chart.clip();
  for (const line of lines) {
    const [from, to] = visible(line.x, range);
    if (band) {
      context.fillStyle = line.color;
      context.globalAlpha = 0.18;
      areas(chart, line, from, to);
      context.globalAlpha = 1;
    }
    context.strokeStyle = line.color;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.fillStyle = line.color;
    context.beginPath();
    const few = to - from <= (chart.width - chart.left) / 24;
    let down = false;
    for (let i = from; i < to; i++) {
      if (!Number.isFinite(line.mean[i])) { down = false; continue; }
      const x = chart.x(line.x[i]), y = chart.y(line.mean[i]);
      if (down) context.lineTo(x, y); else context.moveTo(x, y);
      // A value of its own has no line.
      if (few || (!down && !(i + 1 < to && Number.isFinite(line.mean[i + 1])))) context.fillRect(x - 2, y - 2, 4, 4);
      down = true;
    }
    context.stroke();
    if (chart.hover !== null && line.x.length) {
      const i = nearest(line.x, chart.hover);
      if (Number.isFinite(line.mean[i])) {
        context.fillStyle = line.color;
        context.beginPath();
        context.arc(chart.x(line.x[i]), chart.y(line.mean[i]), 3.2, 0, 7);
        context.fill();
      }
    }
  }
  context.restore();
  chart.end(selection);
}

function areas(chart, line, from, to) {
  const context = chart.context;
  const known = (i) => Number.isFinite(line.low[i]) && Number.isFinite(line.high[i]);
  for (let i = from; i < to; i++) {
    if (!known(i)) continue;
    let stop = i;
    while (stop < to && known(stop)) stop++;
    context.beginPath();
    for (let j = i; j < stop; j++) context.lineTo(chart.x(line.x[j]), chart.y(line.high[j]));
    for (let j = stop - 1; j >= i; j--) context.lineTo(chart.x(line.x[j]), chart.y(line.low[j]));
    context.fill();
    i = stop;
  }
}

// areas: [{values, color}], stacked from the axis upwards.
export function drawStack(chart, range, xs, areas, { format, selection = null }) {
  const context = chart.begin(range), [from, to] = visible(xs, range), sums = [];
  for (let i = from; i < to; i++) sums.push(areas.reduce((sum, part) => sum + (part.values[i] || 0), 0));
  const high = Math.min(quantile(sums, 0.985) * 1.3, Math.max(...sums.filter(Number.isFinite), 0)) || 1;
  chart.scale = [0, withoutPeaks(sums, high) * 1.04];
  chart.axes(format);
  chart.clip();
  const base = new Float64Array(to - from);
  for (const part of areas) {
    context.fillStyle = part.color;
    context.beginPath();
    // Steps, not slopes: a bucket has one value.
    for (let i = from; i < to; i++) {
      const [left, right] = edges(chart, xs, i), y = chart.y(base[i - from] + (part.values[i] || 0));
      context.lineTo(left, y);
      context.lineTo(right, y);
    }
    for (let i = to - 1; i >= from; i--) {
      const [left, right] = edges(chart, xs, i), y = chart.y(base[i - from]);
      context.lineTo(right, y);
      context.lineTo(left, y);
      base[i - from] += part.values[i] || 0;
    }
    context.fill();
  }
  context.restore();
  chart.end(selection);
}

function edges(chart, xs, i) {
  const before = i > 0 ? (xs[i - 1] + xs[i]) / 2 : xs[i] - (xs.length > 1 ? (xs[1] - xs[0]) / 2 : 0.5);
  const after = i + 1 < xs.length ? (xs[i] + xs[i + 1]) / 2 : xs[i] + (xs.length > 1 ? (xs[i] - xs[i - 1]) / 2 : 0.5);
  return [chart.x(before), chart.x(after)];
}

export function heatHeight(rows) {
  return MARGIN.top + MARGIN.bottom + Math.min(360, Math.max(rows * 22, 44));
}

// rows: [[first rank, last rank]]; values and slow: flat arrays of rows * xs.length; named: ranks whose row has a mark.
export function drawHeat(chart, range, xs, rows, values, slow, named, { selection = null }) {
  const count = xs.length, context = chart.begin(range), [from, to] = visible(xs, range), shown = [];
  for (let row = 0; row < rows.length; row++)
    for (let i = from; i < to; i++) shown.push(values[row * count + i]);
  // A span of at least 25 % keeps noise from looking like a difference.
  const low = quantile(shown, 0.02), high = Math.max(withoutPeaks(shown, quantile(shown, 0.98)), low * 1.25);
  chart.limits = [low, high];
  const space = chart.height - MARGIN.top - MARGIN.bottom, each = space / rows.length, gap = each > 8 ? 1 : 0;
  const mark = color("--slow");
  chart.clip();
  // One image of cells, scaled to the place of its columns: fast for thousands of cells.
  const image = context.createImageData(Math.max(1, to - from), rows.length);
  for (let row = 0; row < rows.length; row++)
    for (let i = from; i < to; i++) {
      const value = values[row * count + i], at = 4 * (row * (to - from) + i - from);
      if (!Number.isFinite(value)) continue;
      const [r, g, b] = ramp((value - low) / (high - low));
      image.data.set([r, g, b, 255], at);
    }
  const cells = document.createElement("canvas");
  cells.width = Math.max(1, to - from);
  cells.height = rows.length;
  cells.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  if (to > from) {
    const left = edges(chart, xs, from)[0], right = edges(chart, xs, to - 1)[1];
    for (let row = 0; row < rows.length; row++)
      context.drawImage(cells, 0, row, to - from, 1, left, MARGIN.top + row * each, right - left, each - gap);
  }
  const isSlow = rows.map(([first, last]) => named.some((rank) => first <= rank && rank <= last));
  context.fillStyle = mark;
  for (let row = 0; row < rows.length; row++)
    for (let i = from; i < to; i++)
      if (slow[row * count + i]) {
        let stop = i;
        while (stop < to && slow[row * count + stop]) stop++;
        const left = edges(chart, xs, i)[0], right = edges(chart, xs, stop - 1)[1], thick = Math.min(4, each / 3);
        context.fillRect(left, MARGIN.top + (row + 1) * each - thick - gap, Math.max(1, right - left), thick);
        i = stop;
      }
  context.restore();
  context.textAlign = "right";
  context.textBaseline = "middle";
  // The names of slow ranks come first, and others where there is space.
  const taken = [], order = [...rows.keys()].sort((a, b) => isSlow[b] - isSlow[a] || a - b);
  const skip = Math.ceil(14 / each), round = skip > 1 ? [2, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128].find((step) => step >= skip) || skip : 1;
  for (const row of order) {
    const y = MARGIN.top + (row + 0.5) * each;
    if ((!isSlow[row] && row % round) || taken.some((other) => Math.abs(other - y) < 13)) continue;
    taken.push(y);
    const [first, last] = rows[row], name = first === last ? `${first}` : `${first}–${last}`;
    context.fillStyle = isSlow[row] ? mark : color("--soft");
    context.fillText((isSlow[row] ? "▲ " : "") + name, chart.left - 7, y);
  }
  chart.stepAxis();
  chart.end(selection);
}

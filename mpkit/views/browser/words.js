// Numbers as people read them, as units.py writes them.

const FONT = "$font"; // the theme's

function digits(value) {
  const size = Math.abs(value);
  if (size < 9.995) return value.toFixed(2);
  return size < 99.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}

function seconds(value) {
  if (!value) return "0 s";
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (Math.abs(value) >= factor * 0.9995) return `${digits(value / factor)} ${unit}`;
  }
  return `${digits(value * 1e9)} ns`;
}

function amount(value, base) {
  for (const [factor, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= factor * 0.9995) return `${digits(value / factor)} ${unit}${base}`;
  }
  return `${Math.round(value)} ${base}`;
}

/** Bytes of memory: GiB; under one of them MiB, and so on. */
function memory(value) {
  const [factor, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([bytes]) => value >= 0.9995 * bytes) ?? [1, "B"];
  if (unit === "B") return `${Math.round(value)} B`;
  const number = value / factor;
  return `${unit === "GiB" && number >= 0.995 ? number.toFixed(1) : digits(number)} ${unit}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** Round times between t0 and t1, at most `most` of them: [[time, words], ...]. */
function ticks(t0, t1, most) {
  const length = t1 - t0;
  if (!(length > 0) || !Number.isFinite(length)) return [];
  const power = 10 ** Math.floor(Math.log10(length / most));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor * most >= length * (1 - 1e-9));
  const [factor, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([f]) => Math.abs(t1) >= f || f === 1e-9);
  // One unit for all, of the largest time; as many digits as the step between two needs.
  const places = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  const found = [];
  for (let i = Math.ceil(t0 / step - 1e-9); i * step <= t1 + step * 1e-9; i++) {
    const words = ((i * step) / factor).toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: places });
    found.push([i * step, i === 0 ? "0" : `${words} ${unit}`]);
  }
  return found;
}

/** "#0072b2" as [0, 114, 178]. */
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

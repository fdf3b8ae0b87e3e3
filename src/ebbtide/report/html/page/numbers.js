// Numbers for people, as ebbtide.units writes them: needed bytes are rounded up, allowed ones down.

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

function bytesWith(count, whole) {
  if (Math.abs(count) < 1024) return `${count} B`;
  let hundredths = 0, name = "";
  for (let power = 1; power <= UNITS.length; power++) {
    hundredths = whole((100 * count) / 1024 ** power);
    name = UNITS[power - 1];
    if (Math.abs(hundredths) < 102400) break;
  }
  const digits = Math.abs(hundredths);
  return `${hundredths < 0 ? "-" : ""}${Math.floor(digits / 100)}.${String(digits % 100).padStart(2, "0")} ${name}`;
}

const bytesText = count => bytesWith(count, Math.ceil);
const allowedText = count => bytesWith(count, Math.floor);
const percentText = share => `${(share * 100).toFixed(2)} %`;
const countText = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function shareText(part, whole) {
  return whole ? `${(Math.ceil((10000 * part) / whole) / 100).toFixed(2)} %` : "0.00 %";
}

function secondsText(seconds) {
  if (Math.abs(seconds) < 1e-3) return `${(seconds * 1e6).toFixed(0)} us`;
  if (Math.abs(seconds) < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 1e6 ? `${seconds.toFixed(2)} s` : `${seconds.toExponential(3)} s`;
}

// Times on an axis up to `most`, all in one unit.
function timesText(most) {
  const [unit, name] = most < 1e-3 ? [1e-6, "us"] : most < 1 ? [1e-3, "ms"] : [1, "s"];
  return seconds => (most < 1e6 ? `${+(seconds / unit).toPrecision(4)} ${name}` : secondsText(seconds));
}

// Round numbers for an axis from 0 to most, about `count` of them; bytes go in powers of two.
function ticks(most, count, binary) {
  if (!(most > 0)) return [0];
  const base = binary ? 2 : 10;
  const rough = most / count;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = (binary ? [1, 2] : [1, 2, 5, 10]).map(f => f * power).find(each => each >= rough) || base * power;
  const found = [];
  for (let i = 0; i * step <= most * 1.0001; i++) found.push(i * step);
  return found;
}

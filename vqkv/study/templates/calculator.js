// vqkv.recommend in the browser: the same sums over the same numbers, which tests compare.
const known = JSON.parse(document.getElementById("known").textContent);
const form = document.getElementById("calculator"), table = document.getElementById("recommended");
const MOST = 2 ** 40;

function parts(c, tokens) {
  const sinks = Math.min(tokens, c.sink_tokens), rest = Math.max(0, tokens - sinks - c.recent_window);
  const packed = rest - rest % c.block;
  return [packed, tokens - packed];
}
function stored(c, tokens, batch) {
  const [packed, exact] = parts(c, tokens);
  return Math.ceil(batch * (packed / c.block) * c.block_bytes) + batch * exact * c.exact;
}
function peak(c, tokens, batch) {
  const beyond = tokens - c.sink_tokens - c.recent_window;
  const before = beyond >= c.block ? tokens - beyond % c.block - 1 : tokens;
  return c.weights + c.side_information + Math.max(...[tokens, before].map(n => stored(c, n, batch) + batch * n * c.working));
}
function largest(fits) {
  let low = 0, high = MOST;
  while (high - low > 1) { const middle = Math.floor((low + high) / 2); if (fits(middle)) low = middle; else high = middle; }
  return low;
}
function row(c, context, batch, memory) {
  const bytes = stored(c, context, batch) + c.side_information, values = context * batch * c.values;
  const even = 8 * c.block_bytes / (c.block * c.values) >= 16 ? 0 : largest(n => stored(c, n, 1) + c.side_information >= n * c.exact) + 1;
  return { ...c, bits: 8 * bytes / values, gb: bytes / 1e9, side: c.side_information / 1e6, even,
           longest: memory === null ? null : largest(n => peak(c, n, batch) <= memory),
           ms: c.ns_per_value === null ? null : c.ns_per_value * values / 1e6 };
}
function recommend(model, context, batch, memory, ms) {
  const rows = known[model].filter(c => c.least <= context * batch && context * batch < c.below).map(c => row(c, context, batch, memory));
  rows.sort((a, b) => [a.bits - b.bits, a.kl - b.kl].find(x => x) || 0);
  const good = rows.filter(r => (memory === null || r.longest >= context) && (ms === null || (r.ms !== null && r.ms <= ms)));
  good.forEach((r, i) => r.good = !good.slice(0, i).some(other => other.kl <= r.kl));
  return rows;
}
const digits = (x, n) => x === null ? "" : Number(x.toPrecision(n)).toLocaleString("en", { maximumSignificantDigits: n });
const columns = {
  "system": r => r.system, "bits a value, all told": r => digits(r.bits, 3), "GB": r => digits(r.gb, 3), "side info, MB": r => digits(r.side, 3),
  "break-even, tokens": r => digits(r.even, 6), "longest, tokens": r => digits(r.longest, 7), "ms more a token": r => digits(r.ms, 3),
  "KL, SmolLM2-135M": r => r.kl ? r.kl.toExponential(1) : "0", "facts lost, points": r => r.facts_lost.toFixed(1),
};

function show() {
  const given = name => form[name].value === "" ? null : Number(form[name].value);
  const [context, batch] = ["context", "batch"].map(name => Math.max(1, Math.min(MOST, Math.floor(given(name) || 1))));
  const memory = given("memory") === null ? null : given("memory") * 1e9;
  const cells = (tag, texts) => texts.map(text => { const cell = document.createElement(tag); cell.textContent = text; return cell; });
  const line = (tag, texts) => { const made = document.createElement("tr"); made.append(...cells(tag, texts)); return made; };
  const rows = recommend(form.model.value, context, batch, memory, given("ms"));
  table.tHead.replaceChildren(line("th", Object.keys(columns)));
  table.tBodies[0].replaceChildren(...rows.map(r => {
    const made = line("td", Object.values(columns).map(column => column(r)));
    made.className = r.good ? "good" : "";
    return made;
  }));
}
Object.keys(known).forEach(name => form.model.add(new Option(name, name, false, name.includes("Llama-3-8B"))));
new URLSearchParams(location.hash.slice(1)).forEach((value, name) => { if (form[name]) form[name].value = value; });
if (!(form.model.value in known)) form.model.selectedIndex = 0;
form.addEventListener("input", show);
form.addEventListener("submit", event => event.preventDefault());
show();

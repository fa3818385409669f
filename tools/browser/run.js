// Makes chosen cells runnable and figures live. Python starts in a worker at the reader's first click, not before.
const here = new URL('.', import.meta.url);
const el = (tag, props = {}, ...kids) => { const e = Object.assign(document.createElement(tag), props); e.append(...kids); return e; };
const button = (text, onclick) => el('button', {type: 'button', textContent: text, onclick});
const sorry = text => 'Python could not start in this browser (' + text + '). What stands here is a stored run.';

// ---- the worker
let worker, seq = 0, alive = false;
const jobs = new Map();

function drop(text) { // every job ends, the next one starts a new worker
  for (const job of jobs.values()) job.reject(new Error(text));
  jobs.clear(); worker?.terminate(); worker = null; alive = false;
}
function begin() {
  worker = new Worker(new URL('worker.js', here), {type: 'module'});
  worker.onerror = e => drop(sorry(e.message || 'the worker did not start'));
  worker.onmessage = ({data: m}) => {
    if (m.type === 'status') return document.querySelectorAll('.run-status').forEach(s => s.textContent = m.text);
    if (m.type === 'dead') return drop(sorry(m.text));
    const job = jobs.get(m.id);
    if (!job) return;
    if (m.type === 'out') { alive = true; return job.out?.(m); }
    jobs.delete(m.id);
    if (m.type === 'done') { alive = true; job.resolve(m.value); } else job.reject(new Error(m.text));
  };
}
function call(message, out) {
  if (!worker) begin();
  return new Promise((resolve, reject) => { jobs.set(++seq, {resolve, reject, out}); worker.postMessage({id: seq, ...message}); });
}

// ---- what a cell shows
const inline = text => text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).map(s =>
  s[0] === '`' ? el('code', {}, s.slice(1, -1)) : s.startsWith('**') ? el('b', {}, s.slice(2, -2)) : s);
function markdown(text) { // paragraphs and tables, as our cells print them
  const box = el('div');
  for (const part of text.trim().split(/\n\s*\n/)) {
    const rows = part.trim().split('\n');
    if (!rows[0].startsWith('|')) { box.append(el('p', {}, ...inline(part.trim()))); continue; }
    const cells = row => row.trim().replace(/^\||\|$/g, '').split('|').map(c => c.trim());
    const line = (row, tag) => el('tr', {}, ...cells(row).map(c => el(tag, {}, ...inline(c))));
    box.append(el('table', {className: 'table'}, el('thead', {}, line(rows[0], 'th')), el('tbody', {}, ...rows.slice(2).map(r => line(r, 'td')))));
  }
  return box;
}
function show(out, {mime, data}) {
  if (mime === 'stream') {
    let last = out.lastElementChild;
    if (!last?.matches('.run-stream')) out.append(last = el('pre', {className: 'run-stream'}));
    last.append(data);
  } else if (mime === 'text/plain') out.append(el('pre', {}, data));
  else if (mime === 'text/markdown') out.append(markdown(data));
  else out.append(el('div', {innerHTML: data})); // SVG and HTML that the reader's own code made
}

// ---- cells: a click runs the cell and what it builds on, from nothing, so nothing old lingers
const cells = new Map();
let page;
const builds = async () => page ??= await (await fetch(new URL('pages/' + document.querySelector('[data-run-page]').dataset.runPage + '.json', here), {cache: 'no-cache'})).json();

function cell(box) {
  const id = box.id.slice(4), code = box.querySelector('pre.cell-code code'), status = el('span', {className: 'run-status'});
  const out = el('div', {className: 'run-output'}), run = button('Run here'), stop = button('Stop'), back = button('As it was');
  const first = code.innerHTML, text = code.innerText;
  const c = {source: () => code.innerText === text ? null : code.innerText};
  out.setAttribute('aria-live', 'polite');
  stop.hidden = back.hidden = true;
  try { code.contentEditable = 'plaintext-only'; } catch { code.contentEditable = 'true'; }
  code.spellcheck = false;
  code.setAttribute('role', 'textbox');
  code.setAttribute('aria-multiline', 'true');
  code.setAttribute('aria-label', 'Python code, to be edited; Shift+Enter runs it');
  code.addEventListener('input', () => back.hidden = code.innerText === text);
  code.addEventListener('keydown', e => { if (e.key === 'Enter' && e.shiftKey) { e.preventDefault(); run.click(); } });
  back.onclick = () => { code.innerHTML = first; back.hidden = true; out.replaceChildren(); box.classList.remove('was-run'); };
  stop.onclick = () => drop('Stopped. Python starts anew at the next run.');
  run.onclick = async () => {
    run.disabled = true; stop.hidden = false; out.replaceChildren();
    try {
      const {needs, source} = (await builds())[id], all = await builds();
      const sources = needs.map(n => cells.get(n)?.source() ?? all[n].source);
      await call({what: 'run', sources: [...sources, c.source() ?? source]}, m => show(out, m));
      box.classList.add('was-run');
    } catch (e) {
      if (alive) box.classList.add('was-run'); // else the stored output stays
      out.append(el('pre', {className: 'run-error'}, e.message));
    }
    run.disabled = false; stop.hidden = true;
    document.querySelectorAll('.run-status').forEach(s => s.textContent = '');
  };
  (code.closest('.code-copy-outer-scaffold') ?? code.closest('pre')).after(el('div', {className: 'run-bar'}, run, stop, back, status), out);
  cells.set(id, c);
}
document.querySelectorAll('.run-here').forEach(cell);

// ---- live figures: <div data-live="module:Class"> with the stored picture inside; the class draws, this only asks
function control(name, kind, changed) { // [lowest, highest, first value] or a list of words or a text
  const label = el('label', {}, name.replaceAll('_', ' '));
  let input;
  if (typeof kind === 'string') input = el('input', {type: 'text', value: kind});
  else if (typeof kind[0] === 'string') input = el('select', {}, ...kind.map(k => el('option', {textContent: k})));
  else {
    const now = el('output', {textContent: kind[2]});
    input = el('input', {type: 'range', min: kind[0], max: kind[1], value: kind[2]});
    input.addEventListener('input', () => now.textContent = input.value);
    label.append(input, now);
  }
  if (!input.parentNode) label.append(input);
  input.addEventListener('input', changed);
  return [name, input, label];
}
function figure(box, n) {
  const picture = el('div', {className: 'live-picture'}, ...box.childNodes), bar = el('div', {className: 'run-bar'});
  const ask = (method, args = {}) => call({what: 'live', figure: 'figure' + n, where: box.dataset.live, method, args});
  const draw = async (method, args) => { const svg = await ask(method, args); if (svg) picture.innerHTML = svg; return svg; };
  let timer;
  const halt = () => { clearInterval(timer); timer = null; };
  const start = button('Make it live', async () => {
    start.disabled = true;
    try {
      let inputs = [];
      const reset = () => { halt(); return draw('reset', Object.fromEntries(inputs.map(([k, i]) => [k, i.value]))); };
      inputs = Object.entries(JSON.parse(await ask('controls'))).map(([k, v]) => control(k, v, reset));
      const play = () => { if (timer) return halt(); timer = setInterval(async () => { if (!await draw('step')) halt(); }, 350); };
      await draw('reset', {});
      bar.replaceChildren(button('Step', () => { halt(); draw('step'); }), button('Run or pause', play), button('Start again', reset), ...inputs.map(i => i[2]));
    } catch (e) { bar.replaceChildren(el('span', {className: 'run-status'}, e.message.startsWith('Python') ? e.message : sorry(e.message))); }
  });
  bar.append(start, el('span', {className: 'run-status'}));
  box.append(picture, bar);
}
document.querySelectorAll('[data-live]').forEach(figure);

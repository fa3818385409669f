// node tools/browser_check.mjs _docs build/vendor/expected
// Every chosen cell, with what it builds on, in the site's own Python: it must show what is stored in the notebook.
import { readFileSync, readdirSync, existsSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const [site, expected] = process.argv.slice(2).map(p => resolve(p));
const run = join(site, 'run');
if (!existsSync(run)) { console.log('nothing to check: the site was built without npm'); process.exit(0); }
const base = join(run, readdirSync(run).find(d => d.startsWith('pyodide-')), '/');
const { loadPyodide } = await import(pathToFileURL(base + 'pyodide.mjs'));
let shown = [];
const python = await loadPyodide({indexURL: base, packageBaseUrl: base, lockFileURL: base + 'pyodide-lock.json',
                                  stdout: text => shown.push(['stream', text + '\n']), stderr: text => shown.push(['stream', text + '\n'])});
python.registerJsModule('page', {send: (mime, data) => shown.push([mime, data])});
await python.loadPackage('pagedlm', {messageCallback() {}});
python.runPython(readFileSync(join(run, 'kernel.py'), 'utf8'));

const text = data => Array.isArray(data) ? data.join('') : data;
const plain = s => s.replace(/0x[0-9a-f]+/g, '0x').replace(/\s+/g, ' ').trim();
const forms = ['image/svg+xml', 'text/html', 'text/markdown', 'text/plain'];
function stored(outputs) {
  return outputs.map(o => o.output_type === 'stream' ? text(o.text) : text(o.data[forms.find(f => f in o.data)])).join('\n');
}
let passed = 0, failed = 0;
const start = performance.now();
for (const page of readdirSync(join(run, 'pages'))) {
  const cells = JSON.parse(readFileSync(join(expected, page), 'utf8'));
  for (const [id, c] of Object.entries(cells)) {
    if (!c.needs) continue;
    shown = [];
    const error = await python.globals.get('run')(python.toPy([...c.needs.map(n => cells[n].source), c.source]));
    const got = shown.map(([, data]) => data).join('\n');
    if (!error && plain(got) === plain(stored(c.outputs))) { passed++; continue; }
    failed++;
    console.log(`${page.replace('.json', '')}, cell ${id}, with ${c.needs.length} before it:\n${c.source}\n`
      + (error ?? `shows\n${got.slice(0, 1500)}\nbut the notebook has\n${stored(c.outputs).slice(0, 1500)}`));
  }
}
console.log(`${passed} cells show in the browser's Python what is stored, ${failed} do not; ${((performance.now() - start)/1000).toFixed(1)} s`);
process.exit(failed || !passed ? 1 : 0);

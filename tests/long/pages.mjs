// node pages.mjs TASK PLAYWRIGHT CHROMIUM SITE AXE: looks at the finished site in Chromium; prints what it found as JSON.
// SITE is an address, file:///…/_docs or http://127.0.0.1:…; test_pages.py says what it must be.
import { readFileSync } from 'node:fs';
import { fileURLToPath, pathToFileURL } from 'node:url';

const [task, playwright, chromium, site, axe, ...names] = process.argv.slice(2);
const lib = await import(pathToFileURL(playwright + '/index.mjs'));
const browser = await lib.chromium.launch({executablePath: chromium, args: ['--no-sandbox', '--disable-gpu', '--disable-quic']});

async function open(options = {}) { // a page, and what it asked for and complained of
  const page = await (await browser.newContext({reducedMotion: 'reduce', ...options})).newPage();
  const seen = {asked: [], errors: []};
  page.on('request', r => seen.asked.push(r.url()));
  page.on('pageerror', e => seen.errors.push(String(e)));
  return [page, seen];
}
const go = (page, name) => page.goto(`${site}/${name}.html`);
const elsewhere = seen => seen.asked.filter(url => !url.startsWith(site) && !/^(data|blob):/.test(url));
const python = seen => seen.asked.filter(url => /\/run\/pyodide-/.test(url));

async function press(box, text = 'Run here') { // run a cell, and wait until it has
  await box.getByRole('button', {name: text}).click();
  await box.locator('.run-output > *').first().waitFor({timeout: 120_000});
  await box.getByRole('button', {name: 'Run here'}).and(box.page().locator(':enabled')).waitFor({timeout: 120_000});
  return (await box.locator('.run-output').innerText()).trim();
}

const tasks = {
  // every page, wide and phone, light and dark: axe, overflow, errors, other hosts, time to load
  async look() {
    const source = readFileSync(axe, 'utf8');
    const one = async (width, colorScheme, context, rules = {}) => {
      const [page, seen] = await open({viewport: {width, height: 900}, colorScheme}), found = [];
      for (const name of names) {
        let ms = 1e9;
        for (let i = 0; i < 3 && ms > 2000; i++) { // a busy machine may be slow once
          await go(page, name);
          ms = Math.min(ms, await page.evaluate(() => performance.getEntriesByType('navigation')[0].loadEventEnd));
        }
        await page.evaluate(source);
        const r = await page.evaluate(async ([context, rules]) => {
          const said = e => { const copy = e.cloneNode(true); copy.querySelectorAll('code, pre, .katex').forEach(c => c.remove()); return copy.textContent; };
          return {
            over: document.documentElement.scrollWidth - innerWidth,
            raw: [...document.querySelectorAll('main p, main li, main td')].map(said).filter(t => /\*\*\w[^*]*\*\*|\]\(|^#\||:::/.test(t)),
            axe: (await axe.run(context, {resultTypes: ['violations'], preload: false, ...rules})).violations
              .map(v => `${v.id}: ${v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)).join(' … ')}`),
          };
        }, [context, rules]);
        found.push({name, width, colorScheme, ms, ...r, elsewhere: elsewhere(seen), python: python(seen), errors: seen.errors});
        seen.asked = []; seen.errors = [];
      }
      return found;
    };
    const all = {include: [['html']]}, words = {...all, exclude: [['main pre']]}; // code takes most of the time, and is the same there
    return [...await Promise.all([one(1280, 'light', all), one(1280, 'dark', all, {runOnly: ['color-contrast']})]),
            ...await Promise.all([one(390, 'light', words), one(390, 'dark', words)])].flat();
  },
  // cells: nothing before a click; a result, an edit, an error, a stop; a reload; a second page
  async run() {
    const [page, seen] = await open();
    await go(page, names[0]);
    const box = page.locator('.run-here').nth(1), code = box.locator('pre.cell-code code');
    const before = python(seen).length, stored = await box.locator('.cell-output').first().innerText();
    const first = await press(box), hidden = await box.locator('.cell-output').first().isHidden();
    await code.fill('print(6*7)');
    await box.getByRole('button', {name: 'As it was'}).waitFor();
    const edited = await press(box);
    await code.fill('1/0');
    const error = await press(box);
    await code.fill('while True: pass');
    await box.getByRole('button', {name: 'Run here'}).click();
    await box.getByRole('button', {name: 'Stop'}).click();
    await box.locator('.run-error').waitFor();
    const stopped = await box.locator('.run-output').innerText();
    await box.getByRole('button', {name: 'As it was'}).click();
    const again = await press(box);
    await page.reload();
    const reloaded = await press(page.locator('.run-here').nth(1));
    await go(page, names[1]);
    const other = await press(page.locator('.run-here').first());
    return {before, stored, first, hidden, edited, error, stopped, again, reloaded, other, elsewhere: elsewhere(seen), errors: seen.errors};
  },
  // the home page's figure
  async live() {
    const [page, seen] = await open();
    await go(page, 'index');
    const picture = page.locator('.live-picture'), before = await picture.innerHTML();
    await page.getByRole('button', {name: 'Make it live'}).click();
    await page.getByRole('button', {name: 'Step', exact: true}).waitFor({timeout: 120_000});
    const fresh = await picture.innerHTML();
    await page.getByRole('button', {name: 'Step', exact: true}).click();
    await page.waitForFunction(was => document.querySelector('.live-picture').innerHTML !== was, fresh, {timeout: 30_000});
    return {before, fresh, stepped: await picture.innerHTML(), labels: await page.locator('.run-bar label').allInnerTexts(), elsewhere: elsewhere(seen)};
  },
  // a browser that may not have Python
  async without() {
    const [page] = await open();
    await page.route(/\.wasm$/, route => route.abort());
    await go(page, names[0]);
    const box = page.locator('.run-here').first(), said = await press(box);
    return {said, stays: await box.locator('.cell-output').first().isVisible()};
  },
  // Tab alone: the first stop skips to the text, every stop shows where it is, and a button can be reached and pressed
  async keyboard() {
    const [page] = await open({viewport: {width: 1280, height: 900}});
    await go(page, names[0]);
    const stops = [];
    for (let i = 0; i < 600; i++) {
      await page.keyboard.press('Tab');
      const stop = await page.evaluate(() => {
        const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
        return {text: e.innerText?.slice(0, 40) || e.getAttribute('aria-label') || e.tagName, tag: e.tagName, seen: r.width > 0 && r.height > 0,
                shown: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0 || s.boxShadow !== 'none'};
      });
      stops.push(stop);
      if (stop.text === 'Run here') break;
    }
    await page.keyboard.press('Enter');
    await page.locator('.run-output > *').first().waitFor({timeout: 120_000});
    return {stops, said: await page.locator('.run-output').first().innerText()};
  },
  // the notebook and the module below a title: downloads, or from disk the files themselves
  async take() {
    const [page] = await open({acceptDownloads: true});
    const found = {}, disk = site.startsWith('file:');
    for (const i of [0, 1]) {
      await go(page, names[0]);
      const link = page.locator('.page-files a').nth(i), name = await link.innerText();
      const [got] = await Promise.all([disk ? page.waitForURL('**/' + name) : page.waitForEvent('download'), link.click()]);
      found[name] = readFileSync(disk ? fileURLToPath(page.url()) : await got.path(), 'utf8');
    }
    return found;
  },
};
console.log(JSON.stringify(await tasks[task]()));
await browser.close();

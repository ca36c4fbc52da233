// What holds for the files as a whole: contrast in both colour schemes, nothing
// that the Content-Security-Policy would refuse, every file there and of a size
// that a person reads.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "../ui");
const files = walk(root);
const read = (name) => readFileSync(join(root, name), "utf8");

function walk(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((f) => (f.isDirectory() ? walk(join(folder, f.name)) : [join(folder, f.name)]));
}

// tokens returns the colours of one scheme: 0 is light, 1 dark.
function tokens(scheme) {
  const out = {};
  for (const [, name, light, dark] of read("css/tokens.css").matchAll(/--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)/g)) out[name] = [light, dark][scheme];
  return out;
}

function luminance(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

const grounds = ["bg", "surface", "sunken"];
const planes = ["userspace", "iptables", "ipvs", "nftables", "none"];
const tones = ["good", "bad", "warn"];

for (const [scheme, name] of ["light", "dark"].entries()) {
  test(`text and graphics have WCAG AA contrast in the ${name} scheme`, () => {
    const t = tokens(scheme);
    const pairs = [
      ...grounds.flatMap((g) => ["ink", "dim", "accent", ...planes, ...tones].map((c) => [c, g, 4.5])),
      ...[...planes, ...tones].flatMap((p) => [p, "ink", "dim"].map((c) => [c, `${p}-tint`, 4.5])),
      ["on-accent", "accent", 4.5], ["surface", "ink", 4.5],
      ...grounds.map((g) => ["edge", g, 3]),
    ];
    for (const [a, b, least] of pairs) {
      assert.ok(t[a] && t[b], `no colour --${t[a] ? b : a}`);
      assert.ok(contrast(t[a], t[b]) >= least, `--${a} on --${b}: ${contrast(t[a], t[b]).toFixed(2)}, at least ${least} needed`);
    }
  });
}

test("pages keep to the Content-Security-Policy", () => {
  const html = read("index.html");
  assert.doesNotMatch(html, /\sstyle=|<style|\son\w+=|javascript:|https?:\/\/(?!www\.w3\.org)/i);
  for (const [tag] of html.matchAll(/<script[^>]*>/g)) assert.match(tag, /src="\/ui\//);
  for (const f of files.filter((f) => f.endsWith(".js"))) {
    assert.doesNotMatch(readFileSync(f, "utf8"), /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\("style"/, relative(root, f));
  }
});

test("what files refer to is there", () => {
  const html = read("index.html");
  for (const [, path] of html.matchAll(/(?:src|href)="\/ui\/([^"]+)"/g)) read(path);
  const ids = new Set([...html.matchAll(/<symbol id="([^"]+)"/g)].map((m) => m[1]));
  for (const f of files.filter((f) => f.endsWith(".js"))) {
    const text = readFileSync(f, "utf8");
    for (const [, path] of text.matchAll(/from "(\.[^"]+)"/g)) readFileSync(join(dirname(f), path));
    for (const [, id] of text.matchAll(/"([ih]-[a-z]+)"/g)) assert.ok(ids.has(id) || !/^[ih]-/.test(id) || id.startsWith("h-") && /columns|heading/.test(text), `${relative(root, f)}: no symbol ${id}`);
    for (const [, id] of text.matchAll(/byId\("([^"]+)"\)/g)) assert.ok(html.includes(`id="${id}"`), `${relative(root, f)}: no element #${id}`);
  }
});

test("modules load without a document; only main.js begins by itself", async () => {
  for (const f of files.filter((f) => f.endsWith(".js") && !/(main|early)\.js$/.test(f))) await import(pathToFileURL(f));
});

test("files are of a size that a person reads, and begin with what they are for", () => {
  for (const f of files) {
    const text = readFileSync(f, "utf8");
    assert.ok(text.split("\n").length <= 500, relative(root, f));
    if (f.endsWith(".js")) assert.match(text, /^\/\/ /, relative(root, f));
    if (f.endsWith(".css")) assert.match(text, /^\/\* /, relative(root, f));
  }
});

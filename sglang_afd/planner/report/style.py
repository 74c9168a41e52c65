"""The style sheet of a report, for light and dark, wide and narrow windows."""

STYLE = """
:root { --back: #ffffff; --card: #f5f6f8; --ink: #1c2127; --soft: #5a6472; --grid: #dde1e6;
  --c0: #9a4f00; --c1: #0b62b8; --c2: #1b7a4a; --c3: #7b3fa0; --gain: #1b7a4a; --loss: #b3362b;
  --total: #5a6472; --pays: #1b7a4a; --not: #b3362b; --unsure: #9a6700; --inside: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1e2329; --ink: #e8ebef;
  --soft: #a3adb9; --grid: #343b45; --c0: #f0a35e; --c1: #6cb2f7; --c2: #63cf98; --c3: #c79be6;
  --gain: #63cf98; --loss: #f28b82; --total: #8893a1; --pays: #63cf98; --not: #f28b82;
  --unsure: #e8b84b; --inside: #14171b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; }
h2 { margin: 0 0 6px; font-size: 16px; }
header { border-left: 6px solid var(--unsure); padding-left: 14px; }
header.pays { border-color: var(--pays); } header.pays h1 { color: var(--pays); }
header.not { border-color: var(--not); } header.not h1 { color: var(--not); }
header.unsure h1 { color: var(--unsure); }
.lead { margin: 6px 0; font-size: 17px; }
.about p { margin: 0; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.sides, .figures { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; margin-top: 16px; }
.sides > div, figure { background: var(--card); border-radius: 8px; padding: 12px 14px; margin: 0;
  min-width: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 0;
  font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figure ul, figure p { margin: 6px 0 0; padding-left: 0; list-style: none; font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.tick { fill: var(--soft); font-size: 10.5px; }
.note { fill: var(--soft); font-size: 10.5px; }
.value { font-weight: 600; font-size: 12px; }
.inside { fill: var(--inside); font-size: 10.5px; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); stroke-width: 1; }
.level { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2.2; }
.line.series0 { stroke: var(--c0); } .line.series1 { stroke: var(--c1); }
.line.series2 { stroke: var(--c2); }
.legend { font-weight: 600; }
.legend.series0 { fill: var(--c0); } .legend.series1 { fill: var(--c1); }
.legend.series2 { fill: var(--c2); }
.dot.best { fill: var(--ink); stroke: var(--card); stroke-width: 2; }
.bar.gain { fill: var(--gain); } .bar.loss { fill: var(--loss); } .bar.total { fill: var(--total); }
.bar.micro0 { fill: var(--c1); } .bar.micro1 { fill: var(--c0); } .bar.micro2 { fill: var(--c2); }
.bar.micro3 { fill: var(--c3); }
.rest { margin-top: 16px; }
summary { cursor: pointer; padding: 4px 0; }
pre { background: var(--card); border-radius: 8px; padding: 10px; overflow-x: auto;
  font-size: 12px; }
.small { color: var(--soft); font-size: 13px; }
@media (max-width: 760px) { .sides, .figures { grid-template-columns: 1fr; }
  h1 { font-size: 23px; } .lead { font-size: 16px; } }
"""

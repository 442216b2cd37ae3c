"""Bars in groups, as SVG."""

from xml.sax.saxutils import escape

COLOURS = ("#9aa5b1", "#c3ccd5", "#dbe1e7", "#7b8794", "#52606d")
OWN = "#1f6feb"
BAR, GAP, HEIGHT, LEFT, TOP = 28, 22, 240, 44, 90


def bars(title, names, groups):
    """`groups`: (label, a value for each of `names`); the last name is the one that stands out."""
    most = max(value for _, values in groups for value in values)
    width = LEFT + len(groups) * (len(names) * BAR + GAP) + GAP
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names) - 1)] + [OWN]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + TOP + 40}" font-family="sans-serif" '
           f'font-size="11"><text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>']
    across, down = LEFT, 30
    for name, colour in zip(names, colours):
        if across + 34 + 7 * len(name) > width and across > LEFT:
            across, down = LEFT, down + 16
        out.append(f'<rect x="{across}" y="{down}" width="11" height="11" fill="{colour}"/>'
                   f'<text x="{across + 15}" y="{down + 10}">{escape(name)}</text>')
        across += 34 + 7 * len(name)
    for group, (label, values) in enumerate(groups):
        left = LEFT + group * (len(names) * BAR + GAP)
        for i, (value, colour) in enumerate(zip(values, colours)):
            height = HEIGHT * value / most
            top = TOP + HEIGHT - height
            out.append(f'<rect x="{left + i * BAR}" y="{top:.1f}" width="{BAR - 3}" height="{height:.1f}" fill="{colour}"/>'
                       f'<text x="{left + i * BAR + BAR / 2 - 1}" y="{top - 3:.1f}" text-anchor="middle">{value:.2f}</text>')
        out.append(f'<text x="{left + len(names) * BAR / 2}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{escape(label)}</text>')
    out.append(f'<line x1="{LEFT - 6}" x2="{width - GAP}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}" stroke="#333"/></svg>')
    return "\n".join(out) + "\n"

"""Plots as SVG text, with nothing but the standard library: lines over two logarithmic axes, and dots on one."""

import math
from html import escape

FONT = "font-family='system-ui, sans-serif'"
OURS = "convoy"
# Okabe and Ito: told apart by readers who do not see all colours. The same peer has the same one in every plot.
COLOURS = ["#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000", "#8c564b", "#9acd32"]
KNOWN = {OURS: "#0072b2", "gloo": "#d55e00", "tensorpipe": "#e69f00", "tensorpipe python": "#8c564b", "grpc": "#009e73",
         "openmpi": "#56b4e9", "zmq": "#cc79a7", "oneccl": "#cc79a7", "torch.multiprocessing": "#d55e00"}
# As their projects write them.
PROPER = {OURS: "Convoy", "gloo": "Gloo", "tensorpipe": "TensorPipe", "tensorpipe python": "TensorPipe, from Python",
          "grpc": "gRPC", "openmpi": "Open MPI", "zmq": "ZeroMQ", "oneccl": "oneCCL", "ray": "Ray", "monarch": "Monarch"}
# Not a rival but a floor: drawn as rings.
LIMITS = {"limit": "#888888", "memcpy": "#888888", "ring": "#888888", "endpoint": "#555555", "futex": "#555555",
          "local": "#bbbbbb", "alone": "#bbbbbb", "coll": "#888888", "two cores": "#555555", "floor": "#888888",
          "ideal": "#888888", "without": "#bbbbbb"}


def time_text(us):
    """Three significant digits in the unit that fits."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)):
        if us >= size:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us * 1e3)} ns"


def bytes_text(size):
    for unit, step in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= step:
            return f"{significant(size / step)} {unit}"
    return f"{significant(size)} B"


def rate_text(bytes_per_second):
    for unit, step in (("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3)):
        if bytes_per_second >= step:
            return f"{significant(bytes_per_second / step)} {unit}"
    return f"{significant(bytes_per_second)} B/s"


def significant(value):
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def colours(names):
    """A colour for each name."""
    found = {name: (KNOWN | LIMITS)[name] for name in names if name in KNOWN or name in LIMITS}
    left = [colour for colour in COLOURS if colour not in found.values()] or COLOURS
    others = [name for name in names if name not in found]
    return found | {name: left[i % len(left)] for i, name in enumerate(others)}


class LogAxis:
    def __init__(self, values, start, end, base=10):
        low, high = min(values), max(values)
        step = math.log(base)
        self.first = math.floor(math.log(low) / step + 1e-9)
        self.last = max(math.ceil(math.log(high) / step - 1e-9), self.first + 1)
        self.start, self.end, self.base, self.step = start, end, base, step

    def at(self, value):
        part = (math.log(value) / self.step - self.first) / (self.last - self.first)
        return self.start + part * (self.end - self.start)

    def ticks(self, most=9):
        every = max(1, math.ceil((self.last - self.first) / most))
        return [float(self.base) ** power for power in range(self.first, self.last + 1, every)]


class Drawing:
    def __init__(self, width, height, title, description):
        self.width, self.height = width, height
        self.parts = [f"<title>{escape(title)}</title><desc>{escape(description)}</desc>",
                      f"<rect width='{width}' height='{height}' fill='#ffffff'/>"]
        self.text(12, 22, title, size=15, weight="600")

    def text(self, x, y, words, size=12, anchor="start", weight="400", colour="#222222"):
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' "
                          f"font-weight='{weight}' fill='{colour}'>{escape(words)}</text>")

    def line(self, x1, y1, x2, y2, colour="#e0e0e0", width=1.0):
        self.parts.append(f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
                          f"stroke-width='{width}'/>")

    def dot(self, x, y, name, colour, radius, words):
        look = f"fill='{colour}' stroke='#ffffff'"
        if name in LIMITS:
            look = f"fill='#ffffff' stroke='{colour}' stroke-width='2'"
        self.parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' {look}><title>{escape(words)}</title>"
                          "</circle>")

    def bar(self, x, y, width, height, colour, words):
        self.parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' fill='{colour}'>"
                          f"<title>{escape(words)}</title></rect>")

    def path(self, points, colour, width):
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='{width}'/>")

    def legend(self, names, paint, x, y, most_x):
        for name in names:
            words = PROPER.get(name, name)
            width = 30 + 7 * len(words)
            if x + width > most_x:
                x, y = 12, y + 18
            self.dot(x + 6, y - 4, name, paint[name], 5, name)
            self.text(x + 16, y, words, weight="600" if name == OURS else "400")
            x += width
        return y

    def finish(self):
        return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
                f"width='{self.width}' height='{self.height}' role='img' {FONT}>{''.join(self.parts)}</svg>\n")


def ordered(names):
    """Ours first, floors last."""
    return sorted(set(names), key=lambda name: (name != OURS, name in LIMITS, name))


def lines(title, series, x_text=bytes_text, y_text=time_text, x_label="size", y_label="time"):
    """`series`: side -> [(x, y)], all above zero."""
    names, width, height = ordered(series), 620, 400
    paint = colours(names)
    drawing = Drawing(width, height, title, f"{y_label} over {x_label}: {', '.join(names)}")
    top = drawing.legend(names, paint, 12, 44, width) + 14
    x_axis = LogAxis([x for found in series.values() for x, _ in found], 76, width - 20, base=2)
    y_axis = LogAxis([y for found in series.values() for _, y in found], height - 46, top)
    for tick in x_axis.ticks():
        drawing.line(x_axis.at(tick), top, x_axis.at(tick), height - 46)
        drawing.text(x_axis.at(tick), height - 28, x_text(tick), size=11, anchor="middle")
    for tick in y_axis.ticks():
        drawing.line(76, y_axis.at(tick), width - 20, y_axis.at(tick))
        drawing.text(70, y_axis.at(tick) + 4, y_text(tick), size=11, anchor="end")
    drawing.text((76 + width - 20) / 2, height - 10, f"{x_label} (log)  ·  {y_label} (log)", anchor="middle",
                 colour="#555555")
    for name in reversed(names):  # ours on top
        points = sorted(series[name])
        drawing.path([(x_axis.at(x), y_axis.at(y)) for x, y in points], paint[name], 2.5 if name == OURS else 1.5)
        for x, y in points:
            drawing.dot(x_axis.at(x), y_axis.at(y), name, paint[name], 3.5 if name == OURS else 2.5,
                        f"{name}: {x_text(x)}, {y_text(y)}")
    return drawing.finish()


def dots(title, rows, text=time_text, label="time, log: left is better"):
    """`rows`: [(what, {side: value})]. One line for each, a dot for each side; the values of ours, and how far away
    the nearest other is, stand beside it."""
    names = ordered(side for _, found in rows for side in found)
    paint = colours(names)
    width, left, right = 760, 250, 120
    head = Drawing(width, 0, title, f"{label}: {', '.join(names)}")
    top = head.legend(names, paint, 12, 44, width) + 22
    height = top + 28 * len(rows) + 44
    drawing = Drawing(width, height, title, f"{label}: {', '.join(names)}")
    drawing.legend(names, paint, 12, 44, width)
    axis = LogAxis([value for _, found in rows for value in found.values()], left, width - right)
    bottom = top + 28 * len(rows)
    for tick in axis.ticks(6):
        drawing.line(axis.at(tick), top - 8, axis.at(tick), bottom)
        drawing.text(axis.at(tick), bottom + 16, text(tick), size=11, anchor="middle")
    drawing.text((left + width - right) / 2, bottom + 34, label, anchor="middle", colour="#555555")
    for i, (what, found) in enumerate(rows):
        y = top + 28 * i + 10
        drawing.text(left - 12, y + 4, what, anchor="end")
        drawing.line(left, y, width - right, y)
        for side in reversed(ordered(found)):
            drawing.dot(axis.at(found[side]), y, side, paint[side], 6.5 if side == OURS else 5,
                        f"{what}, {side}: {text(found[side])}")
        if OURS in found:
            drawing.text(width - right + 10, y + 4, text(found[OURS]), weight="600", colour=paint[OURS])
    return drawing.finish()


def stacked(title, parts, rows, text=time_text):
    """`rows`: [(what, values)], a value for each of `parts`: bars whose parts lie side by side, from 0 on."""
    paint = dict(zip(parts, ("#bbbbbb", KNOWN[OURS], *COLOURS)))
    width, left, right, top = 760, 250, 150, 66
    height = top + 28 * len(rows) + 16
    drawing = Drawing(width, height, title, ", ".join(parts))
    drawing.legend(parts, paint, 12, 44, width)
    longest = max(sum(values) for _, values in rows)
    for i, (what, values) in enumerate(rows):
        x, y = left, top + 28 * i
        drawing.text(left - 12, y + 14, what, anchor="end")
        for part, value in zip(parts, values):
            size = max(0.0, value) / longest * (width - left - right)
            drawing.bar(x, y, size, 18, paint[part], f"{what}, {part}: {text(value)}")
            x += size
        drawing.text(x + 8, y + 14, " + ".join(text(max(0.0, value)) for value in values), size=11)
    return drawing.finish()

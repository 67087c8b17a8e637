"""Format numbers and lines for people."""

from textwrap import fill


def seconds(value: float) -> str:
    """Format a time with three digits and a suitable unit.

    >>> seconds(33), seconds(0.01234), seconds(2e-6), seconds(0)
    ('33.0 s', '12.3 ms', '2.00 µs', '0 s')
    """
    if value == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value * 1e9)} ns"


def bytes_text(value: float) -> str:
    """Format bytes in powers of ten, as the papers count them.

    >>> bytes_text(498e6), bytes_text(12)
    ('498 MB', '12 B')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def memory_text(value: float, like: float = 0) -> str:
    """Format bytes of memory in GiB, MiB or KiB, as drivers and frameworks report it.

    `like` is the largest amount of a table or a list, whose unit all its amounts have; 0: the value's own.

    >>> memory_text(45.31 * 2**30), memory_text(0.25 * 2**30), memory_text(0)
    ('45.3 GiB', '256 MiB', '0 B')
    >>> [memory_text(size * 2**30, like=45 * 2**30) for size in (45.3, 0.25, 0.001, 0)]
    ['45.3 GiB', '0.25 GiB', '<0.01 GiB', '0 GiB']
    """
    factor, unit = memory_unit(max(abs(value), like))
    number = value / factor
    if unit == "B" or not value:
        return f"{value:.0f} {unit}"
    if abs(number) < 0.005:
        return f"<0.01 {unit}"
    return f"{number:.1f} {unit}" if unit == "GiB" and abs(number) >= 0.995 else f"{_digits(number)} {unit}"


def memory_share(part: float, whole: float) -> str:
    """Format bytes of memory out of the whole, with one unit.

    >>> memory_share(45.31 * 2**30, 79.1 * 2**30), memory_share(0.5 * 2**30, 79.1 * 2**30)
    ('45.3 of 79.1 GiB', '0.50 of 79.1 GiB')
    """
    held, unit = memory_text(part, max(part, whole)).split(" ")
    return f"{held} of {memory_text(whole, max(part, whole)).removesuffix(f' {unit}')} {unit}"


def memory_unit(value: float) -> tuple[int, str]:
    """Return the unit for memory of this size: its bytes and its name.

    >>> memory_unit(3e9), memory_unit(3e6)
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= 0.9995 * factor:
            return factor, unit
    return 1, "B"


def trim_zeros(words: str) -> str:
    """Drop the digits behind the point of a round amount.

    >>> trim_zeros("20.0 MiB"), trim_zeros("100 ms"), trim_zeros("0 B")
    ('20 MiB', '100 ms', '0')
    """
    number, unit = words.split(" ", 1)
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return number if number == "0" else f"{number} {unit}"


def flops_text(value: float) -> str:
    """Format a number of floating-point operations (not a rate).

    >>> flops_text(2.5e12)
    '2.50 TFLOP'
    """
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}FLOP"
    return f"{value:.0f} FLOP"


def percent(share: float) -> str:
    """Format a fraction of one as a percentage.

    >>> percent(3 / 11)
    '27.3 %'
    """
    return f"{100 * share:.1f} %"


def _digits(value: float) -> str:
    """Format a number between 1 and 1000 or more with three significant digits."""
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def wrapped(line: str, indent: int = 0, width: int = 96) -> str:
    """Wrap a line, which may begin with blanks, so that a notebook's cell does not break it within a word.

    Further lines have an indent of so many blanks; 0: two more than the first.

    >>> print(wrapped("  - one two three", width=12))
      - one two
        three
    """
    indent = indent or len(line) - len(line.lstrip()) + 2
    return fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)

"""Arithmetic worked digit by digit, so that every step is a fact of a table and no step needs a sum in one glance.

The tokenizer cuts digits into groups of up to three, so 0..999 are single tokens and the model has to know the digits
of each. The steps name one digit of each operand, ones first, and the carry or borrow; the answer is put together from
the digits that were written. Low effort writes the facts only, medium says what is written and carried, high works the
inverse afterwards as a check.
"""
from __future__ import annotations

from gptoss_lab.train.dialogues.turn import Context, Key, Turn, answered

PLACES = ("ones", "tens", "hundreds", "thousands")
SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def sum_key(a: int, b: int) -> Key:
    """a + b = b + a, and (a + b) - b = a: one problem."""
    return "sum", min(a, b), max(a, b)


def difference_key(a: int, b: int) -> Key:
    """|a - b|, the sum of the smaller one and the difference."""
    return sum_key(min(a, b), abs(a - b))


def key(sign: str, a: int, b: int) -> Key:
    """The problem `a sign b`."""
    if sign == "*":
        return "product", min(a, b), max(a, b)
    return sum_key(a, b) if sign == "+" else difference_key(a, b)


def result(sign: str, a: int, b: int) -> int:
    """a + b, a - b or a * b."""
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def digits(n: int) -> list[int]:
    """Decimal digits of n >= 0, ones first."""
    return [int(c) for c in reversed(str(n))]


def add_steps(a: int, b: int, full: bool) -> str:
    """The steps of a + b, ones first: "ones: 7+8=15, write 5, carry 1." or, not full, "7+8=15"."""
    facts, carry = [], 0
    for place in range(max(len(digits(a)), len(digits(b)))):
        parts = [d[place] for d in (digits(a), digits(b)) if place < len(d)] + ([carry] if carry else [])
        total = sum(parts)
        fact = "+".join(map(str, parts)) + (f"={total}" if len(parts) > 1 else "")
        carry = total // 10
        facts.append(_fact(place, fact, total, carry, full))
    return _join(facts, full)


def subtract_steps(a: int, b: int, full: bool) -> str:
    """The steps of a - b for a >= b: "tens: 2-1=1, borrow, 11-8=3." or, not full, one fact for each place, "12-1-8=3".
    """
    facts, borrow, other = [], 0, digits(b)
    for place, top in enumerate(digits(a)):
        taken, below = borrow, other[place] if place < len(other) else None
        borrow = int(top - taken < (below or 0))
        if full:
            words = [f"{top}-1={top - 1}"] if taken else []
            words += ["borrow"] if borrow else []
            left = top - taken + 10 * borrow
            if below is not None or borrow:
                words.append(f"{left}-{below or 0}={left - (below or 0)}")
            facts.append(f"{PLACES[place]}: {', '.join(words or [str(top)])}.")
        else:
            parts = [top + 10 * borrow, *([1] if taken else []), *([] if below is None else [below])]
            value = parts[0] - sum(parts[1:])
            facts.append("-".join(map(str, parts)) + (f"={value}" if len(parts) > 1 else ""))
    return _join(facts, full)


def multiply_steps(a: int, b: int, full: bool) -> str:
    """The steps of a * b for a one-digit b: "tens: 4*8=32, 32+5=37, write 7, carry 3."."""
    facts, carry = [], 0
    for place, digit in enumerate(digits(a)):
        total = digit * b
        fact = f"{digit}*{b}={total}"
        if carry:
            fact += f", {total}+{carry}={total + carry}"
            total += carry
        carry = total // 10
        facts.append(_fact(place, fact, total, carry, full))
    return _join(facts, full)


def worked(sign: str, a: int, b: int, effort: str) -> tuple[str, list[Key]]:
    """(the analysis of `a sign b`, its problems). For "*" b has one digit."""
    full = effort != "low"
    if effort == "low" and max(a, b) < 10:
        return "", [key(sign, a, b)]
    if sign == "+":
        steps = add_steps(a, b, full)
        check, extra = f"{a + b}-{b}: {subtract_steps(a + b, b, full)} So {a}.", []
    elif sign == "-" and a >= b:
        steps = subtract_steps(a, b, full)
        check, extra = f"{a - b}+{b}: {add_steps(a - b, b, full)} So {a}.", []
    elif sign == "-":
        first = f"{a} is less than {b}, so {b}-{a} and a minus. " if full else f"{b}-{a}: "
        steps = first + subtract_steps(b, a, full)
        check, extra = f"{b - a}+{a}: {add_steps(b - a, a, full)} So {b}.", []
    else:
        steps = multiply_steps(a, b, full)
        check, extra = _check_product(a, b)
    if not full:
        return steps, [key(sign, a, b)]
    text = f"{steps} So {result(sign, a, b)}."
    if effort == "high":
        return f"{text} Check: {check} Right.", [key(sign, a, b), *extra]
    return text, [key(sign, a, b)]


def draw(context: Context) -> tuple[str, int, int]:
    """A problem: operands up to 999 for + and -, as often small as large; one digit and up to three for *."""
    rng = context.rng
    sign = rng.choice("++--*")
    bounds = (9, 99, 99, 999, 999)
    if sign == "*":
        return sign, rng.randint(0, rng.choice(bounds)), rng.randint(2, 9)
    a, b = (rng.randint(0, rng.choice(bounds)) for _ in range(2))
    return (sign, max(a, b), min(a, b)) if sign == "-" and rng.random() < 0.8 else (sign, a, b)


def ask(context: Context, sign: str, a: int, b: int) -> str:
    """One of the wordings of `a sign b`."""
    rng = context.rng
    spelled = f"{a} {sign} {b}"
    if context.last is not None and rng.random() < 0.3:
        return f"And {spelled}?"
    if rng.random() < 0.5:
        return f"What is {spelled}?"
    return rng.choice((
        f"{spelled} = ?", f"Calculate {spelled}.", f"What is {a} {SIGNS[sign]} {b}?", f"How much is {spelled}?",
        f"{a}{sign}{b}", f"{spelled}", f"Please work out {spelled}.",
    ))


def say(context: Context, sign: str, a: int, b: int) -> str:
    """The final answer."""
    value = result(sign, a, b)
    return str(value) if context.brief else f"{a} {sign} {b} = {value}."


def arithmetic(context: Context) -> Turn:
    """A sum, difference or product, worked by the model itself."""
    sign, a, b = draw(context)
    thought, problems = worked(sign, a, b, context.effort)
    return answered(
        {"+": "add", "-": "subtract", "*": "multiply"}[sign], ask(context, sign, a, b), thought,
        say(context, sign, a, b), tuple(problems), result(sign, a, b),
    )


def follow_up(context: Context) -> Turn:
    """A sum or difference with the value of the previous answer: "Add 12 to that."."""
    last, rng = context.last, context.rng
    if last is None or not 0 <= last <= 999:
        return arithmetic(context)
    other = rng.randint(1, rng.choice((9, 99)))
    sign = "-" if rng.random() < 0.4 and other <= last else "+"
    question = f"Add {other} to that." if sign == "+" else f"Subtract {other} from that."
    thought, problems = worked(sign, last, other, context.effort)
    thought = f"That is {last}. {thought}".strip()
    answer = say(context, sign, last, other)
    return answered("follow_up", question, thought, answer, tuple(problems), result(sign, last, other))


def _check_product(a: int, b: int) -> tuple[str, list[Key]]:
    """A product checked by splitting off the ones: 47*8 is 40*8 and 7*8."""
    ones, rest = a % 10, a - a % 10
    if not ones or not rest:
        return f"{b}*{a} is {a * b}.", []
    first, second = rest * b, ones * b
    text = f"{rest}*{b}={first}, {ones}*{b}={second}, {first}+{second}: {add_steps(first, second, True)} So {a * b}."
    return text, [key("*", rest, b), key("*", ones, b), sum_key(first, second)]


def _fact(place: int, fact: str, total: int, carry: int, full: bool) -> str:
    if not full:
        return fact
    written = f", write {total % 10}, carry {carry}" if carry else ""
    return f"{PLACES[place]}: {fact}{written}."


def _join(facts: list[str], full: bool) -> str:
    return (" " if full else ", ").join(facts)

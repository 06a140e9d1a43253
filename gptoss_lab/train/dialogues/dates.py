"""Dates moved by up to 28 days: the day is added or subtracted, and a month that overflows is taken off or put on."""
from __future__ import annotations

import calendar
import datetime

from gptoss_lab.train.dialogues.turn import Context, Turn, answered

FIRST, LAST = datetime.date(2000, 2, 1), datetime.date(2049, 11, 30)


def random_date(context: Context) -> datetime.date:
    """Any day from 2000-02-01 to 2049-11-30."""
    return FIRST + datetime.timedelta(context.rng.randint(0, (LAST - FIRST).days))


def date(context: Context) -> Turn:
    """Which date is n days after or before another, or after today where the system message has a date."""
    rng, n = context.rng, context.rng.randint(1, 28)
    after, start = rng.random() < 0.6, random_date(context)
    if context.today is not None and rng.random() < 0.3:
        after, start = True, context.today
        n = rng.choice((1, n, n, n))
        question = "What date is tomorrow?" if n == 1 else f"What date is it in {n} days?"
    else:
        days = "1 day" if n == 1 else f"{n} days"
        question = f"What date is {days} {'after' if after else 'before'} {start}?"
    end = start + datetime.timedelta(n if after else -n)
    key = ("date", str(min(start, end)), n)
    thought = f"{_steps(start, n if after else -n)} So {end}."
    if context.effort == "low":
        thought = _steps(start, n if after else -n)
    elif context.effort == "high":
        thought += f" Check: {_steps(end, -n if after else n)} So {start}. Right."
    return answered("date", question, thought, str(end) if context.brief else f"It is {end}.", (key,))


def _steps(start: datetime.date, n: int) -> str:
    """The way from the day of the month to the new one."""
    text = f"{start}: {start.day}{'+' if n > 0 else '-'}{abs(n)}={start.day + n}."
    end = start + datetime.timedelta(n)
    if end.month == start.month:
        return text
    month = start if n > 0 else end
    length = calendar.monthrange(month.year, month.month)[1]
    moved = f"{start.day + n}{'-' if n > 0 else '+'}{length}={end.day}"
    return f"{text} Month {month.month} of {month.year} has {length} days, {moved}."

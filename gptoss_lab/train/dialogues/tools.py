"""Two function tools and questions that need them: a calculator for numbers of any size, and the weather of a city.

A turn with a tool has the call, the tool's result as the model will see it, and the answer that follows from it. The
arguments are written as the models write them: JSON without spaces.
"""
from __future__ import annotations

import json

from gptoss_lab.harmony import Message, Tool, assistant, tool_call, tool_result
from gptoss_lab.train.dialogues import numbers
from gptoss_lab.train.dialogues.turn import Context, Turn

CALCULATOR = Tool("calculator", "Works out an expression.", {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]})
WEATHER = Tool("get_weather", "Gets the weather.", {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
TOOLS = {tool.name: tool for tool in (CALCULATOR, WEATHER)}

_CITIES = (
    "Amsterdam Athens Bangkok Beijing Berlin Boston Brussels Cairo Chicago Copenhagen Delhi Dublin Geneva Hamburg "
    "Helsinki Istanbul Jakarta Lagos Lima Lisbon London Madrid Miami Milan Moscow Mumbai Munich Nairobi Oslo Paris "
    "Prague Rome Seattle Seoul Singapore Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
)
CITIES = tuple(_CITIES.split())
SKIES = ("sun", "rain", "snow", "clouds", "fog", "wind", "storms", "hail")


def call(name: str, **arguments: str) -> Message:
    """A call of `functions.name`."""
    return tool_call(f"functions.{name}", json.dumps(arguments, separators=(",", ":")))


def calculate(context: Context) -> Turn:
    """Arithmetic given to the calculator, up to four digits, or three for a factor."""
    rng = context.rng
    sign, a, b = numbers.draw(context)
    if rng.random() < 0.5:
        a, b = rng.randint(0, 9999), rng.randint(0, 999 if sign == "*" else 9999)
    value = numbers.result(sign, a, b)
    called = call("calculator", expression=f"{a} {sign} {b}")
    thoughts = {
        "low": "", "medium": "I use the calculator.", "high": f"The question is {a} {sign} {b}. I use the calculator.",
    }
    steps = (
        *_thought(thoughts[context.effort]), called, tool_result(called, str(value)),
        assistant(numbers.say(context, sign, a, b)),
    )
    small = value if 0 <= value <= 999 else None
    return Turn("calculator", numbers.ask(context, sign, a, b), steps, (numbers.key(sign, a, b),), small)


def weather(context: Context) -> Turn:
    """The weather in one city, or which of two is warmer."""
    rng = context.rng
    if rng.random() < 0.25:
        return _warmer(context)
    city, degrees, sky = rng.choice(CITIES), rng.randint(-20, 40), rng.choice(SKIES)
    called = call("get_weather", city=city)
    question = rng.choice((
        f"Weather in {city}?", f"What is the weather in {city}?", f"How is the weather in {city}?",
        f"What is the weather like in {city} today?",
    ))
    answer = f"{degrees} degrees, {sky}" if context.brief else f"It is {degrees} degrees in {city}, with {sky}."
    steps = (
        *_thought("" if context.effort == "low" else "I need the tool."), called,
        tool_result(called, f"{degrees} degrees, {sky}"), assistant(answer),
    )
    return Turn("weather", question, steps, (("weather", city, degrees, sky),))


def _warmer(context: Context) -> Turn:
    """Two calls, one after the other, and a comparison."""
    rng = context.rng
    cities, degrees = rng.sample(CITIES, 2), rng.sample(range(-20, 41), 2)
    question = f"Is it warmer in {cities[0]} or {cities[1]}?"
    steps = [*_thought("" if context.effort == "low" else "I need the weather of both.")]
    for city, warmth in zip(cities, degrees, strict=True):
        called = call("get_weather", city=city)
        steps += [called, tool_result(called, f"{warmth} degrees, {rng.choice(SKIES)}")]
    if context.effort != "low":
        steps += _thought(f"{cities[0]} {degrees[0]}, {cities[1]} {degrees[1]}.")
    best = cities[degrees.index(max(degrees))]
    steps.append(assistant(best if context.brief else f"It is warmer in {best}."))
    return Turn("warmer", question, tuple(steps), (("warmer", *sorted(zip(cities, degrees, strict=True))[0],
                                                    *sorted(zip(cities, degrees, strict=True))[1]),))


def _thought(text: str) -> tuple[Message, ...]:
    return (assistant(text, "analysis"),) if text else ()

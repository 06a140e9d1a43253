"""Every test here runs kernels in Triton's interpreter, in a process that compiles nothing.

Triton puts its own functions in place of the language's at every launch and at every call of a device function, and
looks a dtype up each time: half of these tests' time. Here it does so once for a kernel, and they stay in place.
"""
import functools

from triton.runtime import interpreter

if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
    put_in_place, numpy_dtype, known = interpreter._patch_lang, interpreter._get_np_dtype, {}

    @functools.cache
    def once(function):
        scope = put_in_place(function)
        scope._changes.clear()                           # so that nothing is taken back when the launch ends
        return scope

    def by_name(kind):
        if kind.name not in known:
            known[kind.name] = numpy_dtype(kind)
        return known[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = once, by_name

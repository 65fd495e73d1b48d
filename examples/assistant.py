"""A call of a tool, an answer from files, and vectors of texts, through the C API.

python3 assistant.py target/release/libcactus.so MY-BUNDLE MY-FILES
"""

import ctypes
import json
import sys

from chat import Model

TOOLS = [{
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}]


def set_light(on):
    return "the light is " + ("on" if on else "off")


def embed(model, text):
    dim = ctypes.c_size_t()
    call = lambda out, size: model.lib.cactus_embed(
        ctypes.c_void_p(model.handle), text.encode(), out, ctypes.c_size_t(size), ctypes.byref(dim), ctypes.c_bool(True)
    )
    if call(None, 0) < 0:
        raise RuntimeError(model.lib.cactus_get_last_error().decode())
    vector = (ctypes.c_float * dim.value)()
    if call(vector, ctypes.sizeof(vector)) < 0:
        raise RuntimeError(model.lib.cactus_get_last_error().decode())
    return list(vector)


if __name__ == "__main__":
    library, bundle, files = sys.argv[1:]
    with Model(library, bundle) as model:
        messages = [{"role": "user", "content": "Switch the light on."}]
        answer = model.complete(messages, tools=TOOLS, force_tools=True, max_tokens=200)
        calls = answer["function_calls"]
        print(json.dumps(calls))
        list_of_calls = [{"type": "function", "id": str(i), "function": call} for i, call in enumerate(calls)]
        messages.append({"role": "assistant", "content": answer["response"], "tool_calls": list_of_calls})
        for i, call in enumerate(calls):
            messages.append({"role": "tool", "tool_call_id": str(i), "content": globals()[call["name"]](**call["arguments"])})
        print(json.dumps(model.complete(messages, tools=TOOLS, max_tokens=8)))
        a, b = embed(model, "The Elbe flows into the North Sea."), embed(model, "The Elbe flows into the North Sea.")
        print(round(sum(x * y for x, y in zip(a, b)), 3))
    with Model(library, bundle, files) as model:
        answer = model.complete([{"role": "user", "content": "Where does the Elbe flow?"}], max_tokens=8)
        print(json.dumps(answer["sources"]))

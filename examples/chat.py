"""Asks a model through the C API, with nothing but the standard library.

python3 chat.py target/release/libcactus.so MY-BUNDLE
"""

import ctypes
import json
import sys

TOKEN = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p)


class Model:
    """A bundle that was opened; use it in a `with` block."""

    def __init__(self, library, bundle, corpus=None):
        self.lib = ctypes.CDLL(library)
        self.lib.cactus_init.restype = ctypes.c_void_p
        self.lib.cactus_init.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool]
        self.lib.cactus_destroy.argtypes = [ctypes.c_void_p]
        self.lib.cactus_get_last_error.restype = ctypes.c_char_p
        self.lib.cactus_complete.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p,
            TOKEN, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t,
        ]
        self.handle = self.lib.cactus_init(bundle.encode(), corpus and corpus.encode(), False)
        if not self.handle:
            raise RuntimeError(self.lib.cactus_get_last_error().decode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.cactus_destroy(self.handle)

    def complete(self, messages, on_text=lambda text: None, tools=None, **options):
        buffer = ctypes.create_string_buffer(1 << 20)
        token = TOKEN(lambda text, _id, _user: on_text(text.decode()))
        tools = tools and json.dumps(tools).encode()
        written = self.lib.cactus_complete(
            self.handle, json.dumps(messages).encode(), buffer, len(buffer), json.dumps(options).encode(), tools, token, None, None, 0
        )
        if written < 0:
            raise RuntimeError(self.lib.cactus_get_last_error().decode())
        return json.loads(buffer.value)


if __name__ == "__main__":
    with Model(sys.argv[1], sys.argv[2]) as model:
        pieces = []
        answer = model.complete([{"role": "user", "content": "Name a river. größer 木"}], pieces.append, max_tokens=16)
        assert "".join(pieces) == answer["response"]
        print(json.dumps(answer))
        try:
            model.complete([])
        except RuntimeError as error:
            print(error)

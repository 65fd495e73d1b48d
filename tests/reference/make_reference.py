"""What transformers computes from a real model: the numbers that `tests/real_models.rs` compares with.

    pip install torch transformers tokenizers numpy gguf
    python make_reference.py FOLDER --name smollm2-135m                # weights of the Hugging Face folder
    python make_reference.py FOLDER --name smollm2-135m --gguf X.gguf  # weights of the GGUF file

FOLDER holds config.json and the tokenizer in both cases. The model runs in float32 with eager attention on
the CPU. A GGUF file is dequantised by the `gguf` package (which shares no code with cactus) and put into the
same transformers model. For each prompt the file says

    text            for readers; `ids` are the truth
    question        the user message that the chat template put into `text`, for chats
    ids             token ids of the prompt
    top             [id, logit] of the 20 largest logits after the prompt, largest first
    greedy          48 greedy ids; an end-of-text token does not stop them
    second          second-best id at each of those steps
    margins         best minus second-best logit at each of those steps
    greedy_text     for readers
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

STEPS = 48
TOP = 20

QUESTION = "What is the capital of France, and which river flows through it?"
CONTINUATION = (
    "The steam engine changed the way people travelled. Before it, a journey of a hundred miles took several days, "
    "and most people never left the county in which they were born. The first railway"
)
CODE = (
    "def fibonacci(n: int) -> list[int]:\n"
    '    """Return the first n Fibonacci numbers."""\n'
    "    numbers = [0, 1]\n"
    "    while len(numbers) < n:\n"
)
MANY = "Grüße aus Köln! 東京は日本の首都です。Привет, мир! 👩‍👩‍👧🎉 Ça coûte 12,50 €. The same greeting in Spanish is"

# GGUF tensor role to Hugging Face name within a layer.
ROLES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
GEMMA_ROLES = ROLES | {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def gguf_weights(path):
    """Tensors of a GGUF file, dequantised, under Hugging Face names and in Hugging Face conventions."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    field = lambda key: reader.fields[key].contents()
    architecture = field("general.architecture")
    gemma = architecture.startswith("gemma")
    weights = {}
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        layer = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        if layer:
            roles = GEMMA_ROLES if gemma else ROLES
            name = f"model.layers.{layer[1]}.{roles[layer[2]]}"
            if architecture == "llama" and layer[2] in ("attn_q.weight", "attn_k.weight"):
                # Llama-type files keep the two elements of a rotary pair side by side; transformers keeps halves.
                key = "head_count" if layer[2] == "attn_q.weight" else "head_count_kv"
                heads = int(field(f"llama.attention.{key}"))
                values = values.reshape(heads, shape[0] // heads // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        else:
            name = OUTSIDE[tensor.name]
        if gemma and name.endswith("norm.weight"):
            values = values - 1.0  # stored as 1 + w
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def load(folder, gguf):
    config = transformers.AutoConfig.from_pretrained(folder)
    settings = dict(dtype=torch.float32, attn_implementation="eager")
    if gguf is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
    weights = gguf_weights(gguf)
    config.tie_word_embeddings = "lm_head.weight" not in weights
    model = transformers.AutoModelForCausalLM.from_config(config, **settings)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    allowed = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert not unexpected and set(missing) <= set(allowed), (missing, unexpected)
    model.tie_weights()
    return model.eval()


def prompts(folder):
    """The prompts; special tokens are written out, except those that the tokenizer adds by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first = {"prompt": "chat", "text": text, "question": QUESTION}
    else:
        first = {"prompt": "plain", "text": CONTINUATION}
    return [first, {"prompt": "code", "text": CODE}, {"prompt": "multilingual", "text": MANY}]


@torch.no_grad()
def reference(model, tokenizer, prompt):
    ids = tokenizer.encode(prompt["text"]).ids
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    row = out.logits[0, -1]
    top = row.topk(TOP)
    steps = {"greedy": [], "second": [], "margins": []}
    for _ in range(STEPS):
        best = row.topk(2)
        steps["greedy"].append(int(best.indices[0]))
        steps["second"].append(int(best.indices[1]))
        steps["margins"].append(round(float(best.values[0] - best.values[1]), 4))
        out = model(
            input_ids=best.indices[:1].reshape(1, 1), past_key_values=out.past_key_values, use_cache=True
        )
        row = out.logits[0, -1]
    return {
        **prompt,
        "ids": ids,
        "top": [[int(i), round(float(v), 4)] for v, i in zip(top.values, top.indices)],
        **steps,
        "greedy_text": tokenizer.decode(steps["greedy"], skip_special_tokens=False),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="start of the output file's name")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load(args.folder, args.gguf)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    cases = [reference(model, tokenizer, prompt) for prompt in prompts(args.folder)]
    head = {
        "model": args.name,
        "weights": args.gguf.name if args.gguf else "folder",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    # One line per entry: small, and a change can be read in a diff.
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    line = lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":"))
    body = ",\n".join("{\n" + ",\n".join(f"{line(k)}:{line(v)}" for k, v in case.items()) + "\n}" for case in cases)
    path = args.out / f"{args.name}-{'gguf' if args.gguf else 'hf'}.json"
    path.write_text("{\n" + ",\n".join(lines) + ',\n"cases": [\n' + body + "\n]\n}\n")


if __name__ == "__main__":
    main()

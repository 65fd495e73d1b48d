"""Random JSON schemas for `cactus run --batch`, and whether the answers are valid by an independent validator.

    pip install "jsonschema[format]"
    python random_schemas.py make 200 400 > in.jsonl            # schemas, tokens of an answer at most
    cactus run MODEL --batch in.jsonl -q > out.jsonl            # schemas that no value satisfies are refused
    python random_schemas.py check 400 < out.jsonl              # exit code 1 if an answer that ended is not valid
"""

import collections
import json
import random
import sys

NAMES = ["name", "age", "tags", "address", "city", "zip code", "é", "notes", "items", "kind", "a/b", "x", "price", "when"]
TOPICS = ["a person", "a product", "a travel plan", "a recipe", "a weather report"]
PATTERNS = ["^[a-z]{2,8}$", "^[A-Z]{3}-\\d{2,4}$", "^\\w+@\\w+\\.(com|org)$", "[0-9]$", "^.{1,12}$", "^[^\\s]+ [^\\s]+$"]
FORMATS = ["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri"]
CONSTANTS = [1, 2.5, "fixed", True, None, [1, "a"], {"k": 1}]


class Maker:
    def __init__(self, seed):
        self.random, self.definitions = random.Random(seed), {}

    def string(self):
        r = self.random
        kind = r.randrange(6)
        if kind == 0:
            most = r.randrange(1, 20)
            return {"type": "string", "minLength": r.randrange(most + 1), "maxLength": most}
        if kind == 1:
            return {"type": "string", "pattern": r.choice(PATTERNS), "maxLength": 24}
        if kind == 2:
            return {"type": "string", "format": r.choice(FORMATS)}
        if kind == 3:
            return {"enum": r.sample(["red", "green", "a b", 'q"uote', "new\nline", "ünï"], r.randrange(1, 5))}
        return {"type": "string", "maxLength": 30} if kind == 4 else {"type": "string"}

    def number(self):
        r = self.random
        schema = {"type": r.choice(["integer", "number"])}
        least = r.choice([-100, -1, 0, 1, 5]) + (0.5 if schema["type"] == "number" and r.random() < 0.5 else 0)
        if r.random() < 0.7:
            schema[r.choice(["minimum", "exclusiveMinimum"])] = least
        if r.random() < 0.7:
            schema[r.choice(["maximum", "exclusiveMaximum"])] = least + r.choice([2, 3, 9, 1000])
        if r.random() < 0.3:
            schema["multipleOf"] = r.choice([1, 2, 5] if schema["type"] == "integer" else [0.5, 0.25])
        return schema

    def leaf(self):
        r = self.random
        kind = r.randrange(7)
        if kind < 2:
            return self.string()
        if kind == 2:
            return self.number()
        if kind == 3:
            return {"type": r.choice(["boolean", "null"])}
        return {"const": r.choice(CONSTANTS)} if kind == 4 else {"enum": r.sample([1, "one", None, False, 2.5, -7], 3)}

    def object(self, depth):
        r = self.random
        names = r.sample(NAMES, r.randrange(5))
        schema = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        schema["required"] = [name for name in names if r.random() < 0.7]
        kind = r.randrange(4)
        if kind < 2:
            schema["additionalProperties"] = False
        elif kind == 2:
            schema.update(additionalProperties=self.leaf(), maxProperties=len(names) + 2, required=names)
        elif r.random() < 0.3:
            schema["additionalProperties"] = True
        if r.random() < 0.1:
            schema["patternProperties"] = {"^n_[a-z]+$": self.leaf()}
        if r.random() < 0.2:
            schema.update(required=names, minProperties=len(names))
        return schema

    def array(self, depth):
        r = self.random
        schema = {"type": "array", "items": self.any(depth - 1), "minItems": r.randrange(3)}
        if r.random() < 0.8:
            schema["maxItems"] = schema["minItems"] + r.randrange(4)
        if r.random() < 0.2:
            schema["prefixItems"] = [self.leaf() for _ in range(r.randrange(1, 3))]
        return schema

    def any(self, depth):
        r = self.random
        kind = r.random()
        if depth <= 0 or kind < 0.3:
            schema = self.leaf()
        elif kind < 0.6:
            schema = self.object(depth)
        elif kind < 0.75:
            schema = self.array(depth)
        elif kind < 0.85:
            schema = {"anyOf": [self.any(depth - 1) for _ in range(r.randrange(2, 4))]}
        elif kind < 0.9:
            schema = {"allOf": [self.object(1)], "description": "x"}
        else:
            known = list(self.definitions)
            name = r.choice(known) if known and r.random() < 0.5 else f"d{len(known)}"
            if name not in self.definitions:
                self.definitions[name] = None
                self.definitions[name] = self.any(depth - 1)
            schema = {"$ref": f"#/$defs/{name}"}
        if schema.get("type", "null") != "null" and r.random() < 0.15:
            schema["type"] = [schema["type"], "null"]
        return schema

    def root(self):
        schema = self.object(3) if self.random.random() < 0.9 else self.array(3)
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema


def make(count, most):
    for seed in range(count):
        schema = Maker(seed).root()
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        prompt = f"Describe {TOPICS[seed % len(TOPICS)]} as JSON."
        line = {"id": {"seed": seed, "schema": schema}, "prompt": prompt, "temperature": 1, "seed": seed}
        print(json.dumps(line | {"max_tokens": most, "response_format": form}))


def check(most):
    from jsonschema import Draft202012Validator

    counts = collections.Counter()
    for answer in map(json.loads, sys.stdin):
        schema, what = answer["id"]["schema"], f"seed {answer['id']['seed']}"
        if not answer["success"]:
            counts["refused"] += 1
            print(f"{what}: refused: {answer['error']}")
            continue
        try:
            value = json.loads(answer["response"])
        except ValueError as error:
            cut = answer["decode_tokens"] >= most
            counts["cut"] += cut
            counts["invalid"] += not cut
            if not cut:
                print(f"{what}: {error}: {answer['response']!r}")
            continue
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        errors = [error.message for error in validator.iter_errors(value)]
        if answer["response"] != answer["response"].strip():
            errors.append("white space around the value")
        counts["invalid" if errors else "valid"] += 1
        if errors:
            print(f"{what}: {errors[0]}: {answer['response']!r} for {json.dumps(schema)}")
    print(dict(counts))
    return counts["invalid"] > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["check"]:
        sys.exit(check(int(sys.argv[2])))
    else:
        sys.exit(__doc__)

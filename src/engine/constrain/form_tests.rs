use super::super::tokenizer::Tokenizer;
use super::*;

fn byte_level(more: &[&str]) -> TokenTrie {
    let tokenizer = byte_tokenizer(more, &[]);
    TokenTrie::new(&tokenizer, tokenizer.vocab_len() + 39).unwrap()
}

/// A byte-level tokenizer whose tokens are the 256 bytes, `more`, an end-of-text token, and the control tokens `special`.
pub(in crate::engine) fn byte_tokenizer(more: &[&str], special: &[&str]) -> Arc<Tokenizer> {
    let letter = |byte: u8| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0x00..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap(),
        0xad => '\u{143}',
    };
    let mut vocab = Map::new();
    for byte in 0..=255u8 {
        vocab.insert(letter(byte).to_string(), byte.into());
    }
    for (at, text) in more.iter().enumerate() {
        vocab.insert(text.bytes().map(letter).collect(), (256 + at).into());
    }
    let end = vocab.len();
    let special = (end..).zip(["<end>"].iter().chain(special)).map(|(id, text)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    });
    let json = json!({
        "version": "1.0",
        "added_tokens": special.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Arc::new(Tokenizer::from_text(&json.to_string(), &json!({"eos_token": "<end>"}), None).unwrap())
}

/// How many of the tokens of `ids` a form takes, and whether the answer may end there.
pub(in crate::engine) fn walk(trie: &TokenTrie, constraint: &Constraint, ids: &[u32], end: u32) -> (usize, bool) {
    let mut form = Constrained::over(trie, constraint).unwrap();
    let allows = |form: &mut Constrained, id: u32| form.mask().unwrap().is_none_or(|mask| allows(mask, id));
    for (at, id) in ids.iter().enumerate() {
        if form.finished() || !allows(&mut form, *id) {
            return (at, false);
        }
        form.commit(*id).unwrap();
    }
    let ends = form.finished() || allows(&mut form, end);
    (ids.len(), ends)
}

/// A tokenizer of whole pieces, a byte each for the rest, as sentencepiece makes them.
fn byte_fallback(decoder: Value, pieces: &[&str]) -> Arc<Tokenizer> {
    let mut vocab = Map::new();
    for (id, piece) in
        ["<unk>", "</s>"].into_iter().map(str::to_owned).chain((0..256).map(|byte| format!("<0x{byte:02X}>"))).enumerate()
    {
        vocab.insert(piece, id.into());
    }
    for piece in pieces {
        vocab.insert((*piece).to_owned(), vocab.len().into());
    }
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let json = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "</s>")],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true},
    });
    Arc::new(Tokenizer::from_text(&json.to_string(), &json!({"eos_token": "</s>"}), None).unwrap())
}

/// Tokens of one byte each.
fn bytes() -> &'static TokenTrie {
    static TRIE: OnceLock<TokenTrie> = OnceLock::new();
    TRIE.get_or_init(|| byte_level(&[]))
}

fn allows(mask: &[u32], id: u32) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// How far a text gets, and whether the answer may end there.
fn read(constraint: &Constraint, text: &str) -> (usize, bool) {
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    walk(bytes(), constraint, &ids, 256)
}

fn takes(constraint: &Constraint, text: &str) -> bool {
    read(constraint, text) == (text.len(), true)
}

fn check_schema(schema: Value, good: &[&str], bad: &[&str]) {
    let constraint = Constraint::json_schema(&schema).unwrap_or_else(|e| panic!("{schema}: {e}"));
    for text in good {
        assert!(takes(&constraint, text), "{schema} must take {text}: {:?}", read(&constraint, text));
    }
    for text in bad {
        assert!(!takes(&constraint, text), "{schema} must not take {text}");
    }
}

/// Valid and invalid values by hand, keyword by keyword (JSON schema validation, draft 2020-12).
#[test]
fn keywords_mean_what_the_standard_says() {
    let long = "x".repeat(300);
    let long = format!("\"{long}\"");
    for (schema, good, bad) in [
        (json!({"type": "integer", "minimum": -3, "maximum": 12}), vec!["-3", "0", "12"], vec!["-4", "13", "1.5", "01", "\"1\""]),
        (json!({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}), vec!["1", "2"], vec!["0", "3"]),
        (json!({"type": "number", "minimum": 0.5, "maximum": 2.25}), vec!["0.5", "1", "2.25"], vec!["0.4", "2.26", "3"]),
        (json!({"type": "integer", "multipleOf": 3}), vec!["0", "3", "-6", "12"], vec!["1", "-5"]),
        (json!({"type": "string", "minLength": 2, "maxLength": 3}), vec!["\"éa\"", "\"abc\""], vec!["\"a\"", "\"abcd\""]),
        (json!({"type": "string"}), vec!["\"\"", "\"a\\n\\\"é\"", &long], vec!["\"a", "\"\n\"", "a", "'a'"]),
        (json!({"type": "string", "pattern": "b+$"}), vec!["\"b\"", "\"abb\""], vec!["\"ba\"", "\"\""]),
        (json!({"type": "string", "pattern": "^(a|b)c$"}), vec!["\"ac\"", "\"bc\""], vec!["\"xac\"", "\"acx\""]),
        (json!({"type": "string", "pattern": "^\\d{2}\\.$", "maxLength": 9}), vec!["\"12.\""], vec!["\"1٣.\"", "\"123\""]),
        (json!({"type": ["string", "null"]}), vec!["\"a\"", "null"], vec!["1", "true"]),
        (json!({"enum": ["a", 1, null, [1, {"b": false}]]}), vec!["\"a\"", "1", "null", "[1,{\"b\":false}]"], vec!["\"b\"", "2"]),
        (json!({"const": {"a": [1.5]}}), vec!["{\"a\": [1.5]}"], vec!["{}", "{\"a\": [1.25]}"]),
        (
            json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
            vec!["[true]", "[true, false]"],
            vec!["[]", "[1]", "[true,true,true]"],
        ),
        (
            json!({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false}),
            vec!["[]", "[1]", "[1,2]"],
            vec!["[2]", "[1,2,3]"],
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}],
            "allOf": [{"minItems": 1}], "additionalItems": {"const": 2}}),
            vec!["[1]", "[1,2,2]"],
            vec!["[]", "[1,1]"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"],
            "additionalProperties": false}),
            vec!["{\"a\":1}", "{\"a\": 1, \"b\": [{}]}"],
            vec!["{}", "{\"a\":\"\"}", "{\"a\":1,\"c\":1}"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}}),
            vec!["{}", "{\"a\":1,\"b\":2}", "{\"b\":2}"],
            vec!["{\"a\":2}", "{\"b\":1}", "{\"\\u0061\":2}"],
        ),
        (
            json!({"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": false}),
            vec!["{}", "{\"n_1\":1}"],
            vec!["{\"n_1\":\"\"}", "{\"x\":1}"],
        ),
        (
            json!({"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"const": 1}}),
            vec!["{\"a\":1}", "{\"a\":1,\"b\":1}"],
            vec!["{}", "{\"a\":1,\"b\":1,\"c\":1}"],
        ),
        (json!({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}), vec!["5", "\"a\""], vec!["\"ab\"", "null"]),
        (json!({"oneOf": [{"type": "integer"}, {"type": "null"}]}), vec!["5", "null"], vec!["\"\""]),
        (json!({"allOf": [{"minimum": 2}, {"maximum": 3}], "type": "integer"}), vec!["2", "3"], vec!["1", "4"]),
        (
            json!({"$defs": {"a/b": {"type": "null"}}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}}),
            vec!["[null]"],
            vec!["[1]"],
        ),
        (json!({"$defs": {"é": {"const": 1}}, "$ref": "#/%24defs/%C3%A9"}), vec!["1"], vec!["2"]),
        (
            json!({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"],
            "additionalProperties": false}),
            vec!["{\"next\":null}", "{\"next\":{\"next\":null}}"],
            vec!["{\"next\":{}}"],
        ),
        // A discriminated union, as pydantic writes it.
        (
            json!({"$defs": {
                "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                    "required": ["kind", "lives"], "additionalProperties": false},
                "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"],
                    "additionalProperties": false}},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}),
            vec!["{\"kind\":\"dog\"}", "{\"kind\":\"cat\",\"lives\":9}"],
            vec!["{\"kind\":\"cat\"}", "{\"kind\":\"cow\"}"],
        ),
        // Order of keywords.
        (
            json!({"additionalProperties": false, "allOf": [{"required": ["a"]}], "properties": {"a": {"const": 1}}, "type": "object"}),
            vec!["{\"a\":1}"],
            vec!["{}", "{\"a\":2}", "{\"a\":1,\"b\":1}"],
        ),
        (json!(true), vec!["1", "[]", "{\"a\":\"b\"}"], vec!["", "{"]),
        (json!({"title": "anything", "x-guidance": {"lenient": true, "whitespace_flexible": true}}), vec!["[1]"], vec!["[1"]),
    ] {
        check_schema(schema, &good, &bad);
    }
}

/// Texts of RFC 3339, RFC 5321 and so on, and close misses.
#[test]
fn formats_mean_what_their_standards_say() {
    for (format, good, bad) in [
        (
            "date",
            vec!["2024-02-29", "2000-02-29", "1999-12-31"],
            vec!["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "24-1-1"],
        ),
        ("time", vec!["23:59:59Z", "00:00:00.5+01:30"], vec!["24:00:00Z", "12:00:00", "12:00Z", "23:59:60Z"]),
        ("date-time", vec!["2024-02-29T12:00:00Z"], vec!["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29"]),
        ("email", vec!["a.b+c@example.org"], vec!["a@", "@b", "a..b@example.org", "a@-b.org"]),
        ("hostname", vec!["a", "a-b.example"], vec!["-a", "a_b", "a..b", ""]),
        ("ipv4", vec!["192.168.0.1"], vec!["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", vec!["::1", "2001:db8::8a2e:370:7334"], vec!["1::2::3", "12345::", ":"]),
        ("uuid", vec!["123e4567-e89b-12d3-a456-426614174000"], vec!["123e4567", "123e4567e89b12d3a456426614174000"]),
        ("uri", vec!["https://example.org/a?b#c", "mailto:a@b"], vec!["example.org", "http://a b"]),
        ("duration", vec!["P1Y2M3DT4H", "PT5M", "P2W"], vec!["P", "1D", "P1DT"]),
    ] {
        let constraint = Constraint::json_schema(&json!({"type": "string", "format": format})).unwrap();
        good.iter().for_each(|text| assert!(takes(&constraint, &format!("\"{text}\"")), "{format}: {text}"));
        bad.iter().for_each(|text| assert!(!takes(&constraint, &format!("\"{text}\"")), "{format}: {text}"));
    }
    // A format and a pattern hold together, and say nothing about what is no text.
    check_schema(json!({"format": "date", "pattern": "^2024"}), &["\"2024-01-01\"", "1", "null"], &["\"2023-01-01\"", "\"a\""]);
}

/// The list of validation keywords of the drafts: none may be passed over in silence.
#[test]
fn p25_what_cannot_be_promised_is_refused_with_its_place() {
    for (keyword, value) in [
        ("uniqueItems", json!(true)),
        ("contains", json!({"type": "null"})),
        ("minContains", json!(1)),
        ("maxContains", json!(1)),
        ("if", json!({"type": "null"})),
        ("then", json!({"type": "null"})),
        ("else", json!({"type": "null"})),
        ("not", json!({"type": "null"})),
        ("dependentRequired", json!({"a": ["b"]})),
        ("dependentSchemas", json!({"a": {}})),
        ("dependencies", json!({"a": ["b"]})),
        ("propertyNames", json!({"maxLength": 3})),
        ("unevaluatedProperties", json!(false)),
        ("unevaluatedItems", json!(false)),
        ("$dynamicRef", json!("#a")),
        ("$dynamicAnchor", json!("a")),
        ("$recursiveRef", json!("#")),
        ("$vocabulary", json!({})),
        ("nullable", json!(true)),
        ("maxlength", json!(3)),
        ("requird", json!(["a"])),
        ("minProperties", json!(2)),
        ("minProperties", json!(-1)),
        ("maxLength", json!("3")),
        ("exclusiveMinimum", json!(true)),
        ("minimum", json!("0")),
        ("minimum", json!(9007199254740993u64)),
        ("multipleOf", json!(0)),
        ("const", json!(9007199254740993u64)),
        ("const", json!("\u{1}")),
        ("enum", json!([])),
        ("type", json!("float")),
        ("type", json!([])),
        ("format", json!("unknown")),
        ("format", json!("int32")),
        ("format", json!("iri")),
        ("pattern", json!("(?=a)b")),
        ("pattern", json!("(a")),
        ("pattern", json!("a\\b")),
        ("pattern", json!("a^b")),
        ("pattern", json!("(a)\\1")),
        ("pattern", json!(1)),
        ("$ref", json!("https://example.org/schema.json")),
        ("$ref", json!("other.json#/a")),
        ("$ref", json!("#name")),
        ("$ref", json!("#/$defs/none")),
        ("$id", json!("https://example.org/a")),
        ("$schema", json!("https://example.org/dialect")),
        ("oneOf", json!([{"type": "integer"}, {"type": "number"}])),
        ("anyOf", json!([])),
        ("allOf", json!({})),
        ("properties", json!([])),
        ("required", json!("a")),
        ("items", json!(3)),
    ] {
        for (schema, place) in [
            (json!({"type": "object", "properties": {"a/b": {keyword: value}}}), "/properties/a~1b"),
            (json!({"$defs": {"x": {"type": "array", "items": {keyword: value}}}, "$ref": "#/$defs/x"}), "/$defs/x/items"),
            (json!({"anyOf": [{"type": "null"}, {keyword: value}]}), "/anyOf/1"),
        ] {
            let error = Constraint::json_schema(&schema).expect_err(&schema.to_string());
            assert_eq!(error.kind, Kind::Usage, "{schema}");
            let place = format!("{place}/{keyword}");
            let message = error.message();
            assert!(message.contains(&place) && message.contains(keyword) && !message.contains('\n'), "{schema}: {message}");
        }
    }
    // Values that would have to go on for ever.
    for schema in [
        json!({"$ref": "#"}),
        json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}}),
        json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        json!({"type": "array", "items": {"anyOf": [{"$ref": "#"}]}, "minItems": 1}),
    ] {
        let error = Constraint::json_schema(&schema).expect_err(&schema.to_string());
        assert!(error.kind == Kind::Usage && error.message().contains("no end"), "{schema}: {error}");
    }
    for schema in [
        json!(false),
        json!(3),
        json!([]),
        json!({"type": "string", "const": 1}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
    ] {
        assert_eq!(Constraint::json_schema(&schema).expect_err(&schema.to_string()).kind, Kind::Usage);
    }
    let mut deep = json!({"type": "string"});
    (0..5000).for_each(|_| deep = Value::Object(Map::from_iter([("items".to_owned(), deep.take())])));
    assert!(Constraint::json_schema(&deep).unwrap_err().message().contains("deep"));
    // Values of `serde_json` are dropped by recursion.
    while let Some(inner) = deep.get_mut("items").map(Value::take) {
        deep = inner;
    }
}

/// Between the parts there is one space or one new line with its indentation; nothing comes before or behind.
#[test]
fn p27_white_space_is_bounded_and_the_value_ends_the_answer() {
    let any = Constraint::json_value();
    for text in ["{\"a\": 1}", "{\n    \"a\": [\n\t1\n    ]\n}", "[1, 2]", "\"a\"", "true", "null", "-1.5e3", "[]"] {
        assert!(takes(&any, text), "{text}: {:?}", read(&any, text));
    }
    for (text, at) in [
        (" {}", 0),
        ("\n{}", 0),
        ("{  }", 2),
        ("{\n\n}", 2),
        ("{ \n}", 2),
        ("{\"a\":  1}", 6),
        ("{} ", 2),
        ("[]\n", 2),
        ("\"a\" ", 3),
        ("true ", 4),
        ("12 ", 2),
        ("12\n", 2),
        ("{}{}", 2),
    ] {
        assert_eq!(read(&any, text).0, at, "{text:?}");
    }
    assert_eq!(read(&any, &format!("[\n{}1]", " ".repeat(500))).0, 2 + 32);
    assert_eq!(read(&any, &format!("[\n{}1]", "\t".repeat(500))).0, 2 + 8);
    // All but numbers are over without a word of the model.
    for text in ["{}", "[1]", "\"a\"", "false", "null"] {
        let mut form = Constrained::over(bytes(), &any).unwrap();
        text.bytes().for_each(|byte| {
            assert!(!form.finished());
            form.commit(byte.into()).unwrap();
        });
        assert!(form.finished(), "{text}");
    }
    let object = Constraint::json_object();
    assert!(takes(&object, "{\"a\":[]}") && [" {}", "[]", "1", "\"\"", "null"].iter().all(|text| !takes(&object, text)));
}

/// RFC 8259 lets readers limit numbers; what a 64-bit float holds, all of them take.
#[test]
fn numbers_stay_within_floats() {
    let any = Constraint::json_value();
    for (text, at) in [("[1e999]", 5), ("[-1.5E+123]", 9), ("{\"a\":1e99}", 10), ("[\"1e999\"]", 9)] {
        assert_eq!(read(&any, text).0, at, "{text}");
    }
    let long = format!("[{}", "7".repeat(400));
    let reached = read(&any, &long).0;
    assert!(reached < 210 && format!("{}e99]", &long[..reached]).parse::<Value>().is_ok_and(|v| v[0].as_f64().is_some()));
    assert!(takes(&Constraint::json_schema(&json!({"type": "string"})).unwrap(), "\"1e999\""));
}

#[test]
fn regular_expressions_match_the_whole_text() {
    for (pattern, good, bad) in [
        ("[A-Z][a-z]{2,9} [0-9]{4}", vec!["Week 2026"], vec!["week 2026", "Week 20261", "We 2026"]),
        ("^ab$", vec!["ab"], vec!["a", "abc", "^ab$"]),
        (r"a\$", vec!["a$"], vec!["a", "a\\"]),
        (r"a\\$", vec!["a\\"], vec!["a$"]),
        ("yes|no", vec!["yes", "no"], vec!["maybe", ""]),
        (r"a/b\d", vec!["a/b1"], vec!["a/bb"]),
    ] {
        let constraint = Constraint::regex(pattern).unwrap();
        good.iter().for_each(|text| assert!(takes(&constraint, text), "{pattern}: {text}"));
        bad.iter().for_each(|text| assert!(!takes(&constraint, text), "{pattern}: {text}"));
    }
    for pattern in ["(", "a(?=b)", r"\bword", "[z-a]", r"(a)\1"] {
        let error = Constraint::regex(pattern).expect_err(pattern);
        assert!(error.kind == Kind::Usage && !error.message().contains('\n'), "{pattern}: {error}");
    }
}

/// Text first, then a call whose arguments keep to a schema.
#[test]
fn grammars_hold_their_schemas() {
    let grammar = r#"
start: TEXT? call
TEXT: /[^<]+/
call: "<call>" args "</call>"
args: %json {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
    "additionalProperties": false}
"#;
    let constraint = Constraint::lark(grammar).unwrap();
    for text in ["<call>{\"n\": 3}</call>", "Well, <call>{\"n\":3}</call>"] {
        assert!(takes(&constraint, text), "{text}: {:?}", read(&constraint, text));
    }
    for text in ["Well", "<call>{}</call>", "<call>{\"n\": 30}</call>", "<call>{\"n\":  3}</call>"] {
        assert!(!takes(&constraint, text), "{text}");
    }
    let error = Constraint::lark(&grammar.replace("\"maximum\"", "\"maximun\"")).unwrap_err();
    assert!(error.message().contains("/properties/n/maximun"), "{error}");
    assert!(Constraint::lark("start: %json {\"a\": ").unwrap_err().message().contains("no JSON"));
    for broken in ["", "start", "begin: \"a\"", "start: nothing", "start: \"a\" (", "start: <|no such token|>"] {
        let error = Constraint::lark(broken).and_then(|c| Constrained::over(bytes(), &c).map(|_| ())).expect_err(broken);
        assert!(error.kind == Kind::Usage && !error.message().contains('\n'), "{broken}: {error}");
    }
}

/// Up to a text anything may come but the end.
#[test]
fn the_form_may_begin_behind_a_text() {
    let constraint = Constraint::json_object().after("</t>");
    assert!(takes(&constraint, "so < and </ then </t>{\"a\":1}"));
    assert_eq!(read(&constraint, "so"), (2, false));
    assert_eq!(read(&constraint, "</t> {"), (4, false));
    assert_eq!(read(&constraint, "<</</t>x"), (7, false));
}

/// What a grammar forces comes as the tokens of the model, and each is what the mask then allows alone.
#[test]
fn forced_text_is_given_as_tokens() {
    let trie = byte_level(&["\"name\"", "name", "{\""]);
    let schema =
        json!({"type": "object", "properties": {"name": {"const": "b"}}, "required": ["name"], "additionalProperties": false});
    let mut form = Constrained::over(&trie, &Constraint::json_schema(&schema).unwrap()).unwrap();
    form.commit(b'{'.into()).unwrap();
    form.commit(b'"'.into()).unwrap();
    let mut forced = Vec::new();
    form.forced(7, &mut forced);
    assert!(!forced.is_empty());
    for id in forced {
        let mask = form.mask().unwrap().unwrap();
        assert!(allows(mask, id) && mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1);
        form.commit(id).unwrap();
    }
    let mut none = Vec::new();
    form.forced(0, &mut none);
    assert!(none.is_empty());
}

/// A token that the mask forbids is an error, not a wrong answer.
#[test]
fn forbidden_tokens_are_not_taken() {
    let mut form = Constrained::over(bytes(), &Constraint::json_object()).unwrap();
    assert!(form.commit(b'['.into()).is_err());
    assert!(form.mask().is_err());
}

/// In both kinds of vocabulary the bytes of tokens, put together, are the text that the tokenizer itself decodes.
#[test]
fn tokens_have_the_bytes_that_are_decoded() {
    const PIECES: [&str; 12] = ["{", "}", "\"", ":", "▁", "▁{", "▁a", "é", "▁▁▁", "name", "1", "\n"];
    let steps = |strip: bool| {
        let mut steps = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        steps.extend(strip.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
        json!({"type": "Sequence", "decoders": steps})
    };
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false});
    for (decoder, drops, bytes) in [(steps(true), true, true), (steps(false), false, true), (metaspace, false, false)] {
        let tokenizer = byte_fallback(decoder, &PIECES);
        let width = tokenizer.vocab_len() + 9;
        let trie = TokenTrie::new(&tokenizer, width).unwrap();
        assert_eq!(trie.drops_space, drops);
        // What comes first may lose a space; it is compared behind a token that has none.
        let first = tokenizer.token_id("{").unwrap();
        for id in 2..width as u32 {
            let spelled = tokenizer.token_text(id).unwrap_or_default();
            if spelled.starts_with("<0x") && (!bytes || spelled.as_str() >= "<0x80>") {
                continue;
            }
            let decoded = tokenizer.decode(&[first, id]);
            assert_eq!([b"{", trie.bytes(id)].concat(), decoded.as_bytes(), "{id}");
        }
        // A character that is no piece is its bytes, and a space in front is refused where it would be lost.
        let mut form = Constrained::over(&trie, &Constraint::regex(" ?[{ß]").unwrap()).unwrap();
        let space = tokenizer.token_id("▁{").unwrap();
        assert_eq!(allows(form.mask().unwrap().unwrap(), space), !drops);
        assert!(!allows(form.mask().unwrap().unwrap(), width as u32 - 1), "a row without a token");
        if bytes {
            for byte in "ß".bytes() {
                let id = tokenizer.token_id(&format!("<0x{byte:02X}>")).unwrap();
                assert!(allows(form.mask().unwrap().unwrap(), id));
                form.commit(id).unwrap();
            }
            assert!(form.finished());
        }
    }
    let other = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let error = TokenTrie::new(&byte_fallback(other, &PIECES), 300).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, Kind::Unsupported);
}

/// Answers on many threads share what a model's tokens are to grammars.
#[test]
fn threads_do_not_disturb_one_another() {
    let check = |n: usize| {
        let schema =
            json!({"type": "object", "properties": {"n": {"const": n}}, "required": ["n"], "additionalProperties": false});
        let constraint = Constraint::json_schema(&schema).unwrap();
        for _ in 0..20 {
            assert!(takes(&constraint, &format!("{{\"n\": {n}}}")));
            assert!(!takes(&constraint, &format!("{{\"n\": {}}}", n + 1)));
        }
    };
    std::thread::scope(|scope| (0..8).for_each(|n| drop(scope.spawn(move || check(n)))));
}

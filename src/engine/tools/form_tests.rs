use super::super::{Choice, Tools};
use super::*;
use crate::engine::constrain::TokenTrie;
use crate::engine::constrain::tests::{byte_tokenizer, walk};
use std::sync::Arc;

const MARKS: [&str; 8] = [
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
];

fn tools(choice: &Choice, parallel: bool) -> Tools {
    let list = json!([
        {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1},
                "exact": {"type": "boolean"},
            },
            "required": ["city"], "additionalProperties": false,
        }},
        {"name": "move", "parameters": {
            "type": "object",
            "properties": {"by": {"type": "array", "items": {"type": "number"}}, "to": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            "required": ["by"], "additionalProperties": false,
        }},
        {"name": "now"},
    ]);
    Tools::parse(&list, choice, parallel).expect("tools").expect("some")
}

/// Which of the texts an answer may be, whole. `marked`: the marks are tokens of their own.
fn taken<'t>(notation: Notation, marked: bool, tools: &Tools, texts: &[&'t str]) -> Vec<&'t str> {
    let tokenizer: Arc<Tokenizer> = byte_tokenizer(&[], if marked { &MARKS } else { &[] });
    let trie = TokenTrie::new(&tokenizer, tokenizer.vocab_len()).expect("a trie");
    let dialect = Dialect { notation, declares: true, repeats: true };
    let form = tools.constraint(&dialect, &tokenizer).expect("a grammar").expect("a form");
    let good = |text: &&&str| {
        let ids = tokenizer.encode(text, false).expect("ids");
        walk(&trie, &form, &ids, tokenizer.eos_ids()[0]) == (ids.len(), true)
    };
    texts.iter().filter(good).copied().collect()
}

fn check(notation: Notation, choice: &Choice, parallel: bool, good: &[&str], bad: &[&str]) {
    for marked in [true, false] {
        let tools = tools(choice, parallel);
        assert_eq!(taken(notation, marked, &tools, good), good, "{notation:?}, marks are tokens: {marked}");
        assert_eq!(taken(notation, marked, &tools, bad), [""; 0], "{notation:?}, marks are tokens: {marked}");
    }
}

const FORCED: Choice = Choice::Required;

#[test]
fn forced_calls_are_as_declared_json() {
    let call = |body: &str| format!("<tool_call>\n{body}\n</tool_call>");
    let good = [
        call("{\"name\": \"now\", \"arguments\": {}}"),
        call("{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"unit\": \"C\", \"days\": 3}}"),
        call("{\"name\": \"move\", \"arguments\": {\"by\": [1, -2.5], \"to\": {\"x\": 4}}}"),
    ];
    let two = format!("{}\n{}", good[0], good[1]);
    let bad = [
        "words".to_owned(),
        call("{\"name\": \"later\", \"arguments\": {}}"),
        call("{\"name\": \"get_weather\", \"arguments\": {}}"),
        call("{\"name\": \"get_weather\", \"arguments\": {\"city\": 1}}"),
        call("{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"unit\": \"K\"}}"),
        call("{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 0}}"),
        format!("{} and words", good[0]),
    ];
    let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
    let good: Vec<&str> = good.iter().map(String::as_str).collect();
    check(Notation::Hermes, &FORCED, true, &good, &bad);
    check(Notation::Hermes, &FORCED, true, &[&two], &[]);
    check(Notation::Hermes, &FORCED, false, &good, &[&two]);
    check(Notation::Hermes, &Choice::Named("now".into()), true, &good[..1], &good[1..]);
    let llama = ["{\"name\": \"now\", \"parameters\": {}}", "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}"];
    check(Notation::Llama3, &FORCED, true, &llama, &["{\"name\": \"get_weather\", \"parameters\": {}}", "words"]);
}

#[test]
fn forced_calls_are_as_declared_python() {
    let call = |body: &str| format!("<|tool_call_start|>[{body}]<|tool_call_end|>");
    let good = [
        "now()",
        "get_weather(city=\"Oslo\")",
        "get_weather(city=\"O\\\"s\", unit=\"F\", exact=True)",
        "get_weather(city=\"Oslo\", days=3)",
        "move(by=[1, 2.5], to={\"x\": 1})",
        "now(), now()",
    ];
    let bad = [
        "later()",
        "get_weather()",
        "get_weather(unit=\"F\")",
        "get_weather(city=\"Oslo\", unit=\"K\")",
        "get_weather(city=\"Oslo\", exact=3)",
        "get_weather(city=\"Oslo\", days=0)",
        "get_weather(days=3, city=\"Oslo\")",
        "now",
    ];
    let (good, bad) = (good.map(call), bad.map(call));
    let good: Vec<&str> = good.iter().map(String::as_str).collect();
    let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
    check(Notation::Pythonic, &FORCED, true, &good, &bad);
    check(Notation::Pythonic, &FORCED, false, &good[..5], &good[5..]);
}

#[test]
fn forced_calls_are_as_declared_gemma() {
    for (notation, quote, open, close) in [
        (Notation::FunctionGemma, "<escape>", "<start_function_call>", "<end_function_call>"),
        (Notation::Gemma4, "<|\"|>", "<|tool_call>", "<tool_call|>"),
    ] {
        let call = |body: &str| format!("{open}call:{}{close}", body.replace('Q', quote));
        let good = [
            "now{}",
            "get_weather{city:QOslo \"} x\nyQ}",
            "get_weather{city:QQ,unit:QFQ,days:12,exact:true}",
            "move{by:[1,-2.5],to:{x:3}}",
            "move{by:[]}",
        ];
        let bad = [
            "later{}",
            "get_weather{}",
            "get_weather{unit:QFQ}",
            "get_weather{city:Oslo}",
            "get_weather{city:QOsloQ,unit:QKQ}",
            "get_weather{city:QOsloQ,days:QaQ}",
            "move{by:[QaQ]}",
        ];
        let (good, bad) = (good.map(call), bad.map(call));
        let good: Vec<&str> = good.iter().map(String::as_str).collect();
        let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
        check(notation, &FORCED, true, &good, &bad);
        let two = format!("{}{}", good[0], good[1]);
        check(notation, &FORCED, true, &[&two], &[]);
        check(notation, &FORCED, false, &[], &[&two]);
    }
}

/// The answer is free until a call begins; then it is held to.
#[test]
fn optional_calls_are_as_declared() {
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let inline = "Write <tool_call>{...} to call.";
    let wrong = "<tool_call>\n{\"name\": \"later\", \"arguments\": {}}\n</tool_call>";
    let (worded, behind) = (format!("I look.\n{call}"), format!("{call} and"));
    check(Notation::Hermes, &Choice::Auto, true, &["", "words", call, &worded, inline], &[wrong, &behind]);
    let (good, bad) = ("Well <|tool_call_start|>[now()]<|tool_call_end|>", "<|tool_call_start|>[later()]<|tool_call_end|>");
    check(Notation::Pythonic, &Choice::Auto, true, &["", "[later()]", good], &[bad]);
}

/// Whatever a grammar lets through can be read.
#[test]
fn what_cannot_be_promised_is_refused_where_a_call_must_come() {
    let list =
        json!([{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}}]);
    let tokenizer = byte_tokenizer(&[], &[]);
    let dialect = Dialect { notation: Notation::Hermes, declares: true, repeats: true };
    let of = |list: &Value, choice: &Choice| {
        let tools = Tools::parse(list, choice, true).expect("tools").expect("some");
        tools.constraint(&dialect, &tokenizer).map(|form| form.is_some())
    };
    let error = of(&list, &Choice::Required).expect_err("a pattern that no grammar has").to_string();
    assert!(error.contains("\"f\"") && error.contains("pattern"), "{error}");
    assert!(of(&list, &Choice::Auto).expect("left open"));
    let mut strict = list.clone();
    strict[0]["strict"] = true.into();
    assert!(of(&strict, &Choice::Auto).is_err());
}

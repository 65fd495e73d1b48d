use super::super::notation::tests::tools;
use super::*;
use serde_json::{Value, json};

/// Text and calls of `pieces`, in order.
fn read(notation: Notation, pieces: &[&str]) -> Value {
    let mut reader = Reader::new(notation, tools());
    let mut said: Vec<Value> = Vec::new();
    let mut hear = |event: Event| match event {
        Event::Text(text) => match said.last_mut() {
            Some(Value::String(last)) => last.push_str(text),
            _ => said.push(text.into()),
        },
        Event::Call(call) => said.push(json!([call.name, call.arguments])),
    };
    pieces.iter().for_each(|piece| reader.push(piece, &mut hear));
    reader.finish(&mut hear);
    said.into()
}

/// `text` whole, by characters, and cut at every place, always gives the same.
fn check(notation: Notation, text: &str, expected: Value) {
    let cuts: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
    let characters: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
    assert_eq!(read(notation, &characters), expected, "{text:?} by characters");
    for &at in &cuts {
        let pieces = [&text[..at], &text[at..]];
        assert_eq!(read(notation, &pieces), expected, "{pieces:?}");
    }
}

const HERMES: Notation = Notation::Hermes;

#[test]
fn p22_calls_and_text_are_told_apart() {
    let now = json!(["now", {}]);
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    check(HERMES, call, json!([now]));
    check(HERMES, &format!("I look.\n\n{call}\n{call}\n"), json!(["I look.", now, now]));
    check(HERMES, &format!("{call}{call}"), json!([now, now]));
    check(HERMES, &format!("{call}\nDone.\n"), json!([now, "Done.\n"]));
    // The end of the answer closes a call.
    check(HERMES, "<tool_call>{\"name\": \"now\"}", json!([now]));
    check(HERMES, "plain words, \n two lines\n", json!(["plain words, \n two lines\n"]));
}

#[test]
fn p20_marks_within_arguments_are_text() {
    let text = "a </tool_call> \\ \" <tool_call> {}";
    let call = json!({"name": "log", "arguments": {"entry": text}});
    check(HERMES, &format!("<tool_call>{call}</tool_call>"), json!([["log", {"entry": text}]]));
    let (open, close) = ("<|tool_call_start|>", "<|tool_call_end|>");
    let expected = json!([["log", {"entry": format!("a {close} ' \\")}]]);
    check(Notation::Pythonic, &format!("{open}[log(entry=\"a {close} ' \\\\\")]{close}"), expected);
    let gemma = "<start_function_call>call:log{entry:<escape>\"{<end_function_call>}<escape>}<end_function_call>";
    check(Notation::FunctionGemma, gemma, json!([["log", {"entry": "\"{<end_function_call>}"}]]));
    let gemma = "<|tool_call>call:log{entry:<|\"|>a<tool_call|>\"<|\"|>}<tool_call|>";
    check(Notation::Gemma4, gemma, json!([["log", {"entry": "a<tool_call|>\""}]]));
}

#[test]
fn p20_a_broken_call_is_text_and_the_next_is_a_call() {
    let good = "<tool_call>{\"name\": \"now\"}</tool_call>";
    for broken in [
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"\\:\\u12\"}}</tool_call>",
        "<tool_call>{\"name\": \"elsewhere\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b\" \"}}</tool_call>",
        "<tool_call>{\"name\"</tool_call>",
    ] {
        check(HERMES, &format!("{broken}\n{good}"), json!([broken, ["now", {}]]));
        check(HERMES, broken, json!([broken]));
    }
}

#[test]
fn prose_that_only_looks_like_a_call() {
    for text in [
        "Write <tool_call>{\"name\": \"now\"}</tool_call> in a line.",
        "The mark is <tool_call>",
        "<tool_call> is the mark",
        "```\n<tool_call>{\"name\": \"now\"}</tool_call>\n```\n",
        "So: {\"name\": \"now\", \"arguments\": {}}",
        "{\"name\": \"now\", \"arguments\": {}} is a call",
        "{\"name\": \"now\", \"arguments\": {",
        "{\"name\": \"nowhere\"}",
        "```json\n{\"name\": \"now\"}\n```\nis a call",
        "```python\nprint()\n```",
        "a < b, <tool",
    ] {
        check(HERMES, text, json!([text]));
    }
    let text = "{\"name\": \"Bob\", \"age\": 3}";
    check(Notation::Llama3, text, json!([text]));
    check(Notation::Llama3, "Well, {\"name\": \"now\"}", json!(["Well, {\"name\": \"now\"}"]));
    check(Notation::Pythonic, "[now()]", json!(["[now()]"]));
    let echo = "<start_function_declaration>declaration:now{}<end_function_declaration>";
    check(Notation::FunctionGemma, echo, json!([echo]));
}

#[test]
fn a_call_that_is_the_whole_answer() {
    let call = json!([["get_weather", {"city": "Oslo"}]]);
    check(Notation::Llama3, " {\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}\n", call.clone());
    check(HERMES, "{\"name\":\"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}", call.clone());
    check(HERMES, "```json\n{\n  \"name\": \"get_weather\",\n  \"arguments\": {\"city\": \"Oslo\"}\n}\n```", call.clone());
    check(HERMES, "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}]", call.clone());
    check(Notation::Llama3, "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}", call);
}

/// Plain text goes on as it comes, with no more than a mark held back.
#[test]
fn p22_text_streams_while_tools_are_offered() {
    let mut reader = Reader::new(HERMES, tools());
    let mut pieces = Vec::new();
    for word in ["It ", "is ", "a < b", " and so ", "on."] {
        reader.push(word, &mut |event| pieces.push(format!("{event:?}")));
    }
    assert_eq!(pieces.len(), 5, "{pieces:?}");
}

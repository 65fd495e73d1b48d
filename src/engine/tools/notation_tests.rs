use super::*;
use crate::engine::tools::Choice;
use serde_json::json;

pub(in crate::engine::tools) fn tools() -> Tools {
    let list = json!([
        {"type": "function", "function": {
            "name": "get_weather", "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
        }},
        {"name": "log", "parameters": {"type": "object", "properties": {"entry": {}}}},
        {"name": "now"},
    ]);
    Tools::parse(&list, &Default::default(), true).expect("tools").expect("some")
}

fn calls(notation: Notation, body: &str) -> Option<Value> {
    notation.parse(body, &tools()).map(|calls| serde_json::to_value(calls).expect("JSON"))
}

/// Every notation with the same calls.
#[test]
fn p23_names_and_arguments_are_read_in_every_notation() {
    let expected = json!([{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]);
    for (notation, body) in [
        (Notation::Hermes, "\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Z\\u00fcrich\", \"days\": 2}}\n"),
        (Notation::Hermes, "{\"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"Zürich\\\", \\\"days\\\": 2}\"}"),
        (Notation::Hermes, "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}]"),
        (Notation::Llama3, "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": 2}}"),
        (Notation::Pythonic, "[get_weather(city=\"Zürich\", days=2)]"),
        (Notation::Pythonic, "get_weather(city='Zürich', days = 2,)"),
        (Notation::FunctionGemma, "call:get_weather{city:<escape>Zürich<escape>,days:2}"),
        (Notation::Gemma4, "call:get_weather{city:<|\"|>Zürich<|\"|>, days:2}"),
        (Notation::Gemma4, "call:get_weather{<|\"|>city<|\"|>:<|\"|>Zürich<|\"|>,days:2}"),
    ] {
        assert_eq!(calls(notation, body), Some(expected.clone()), "{notation:?} {body}");
    }
}

#[test]
fn nested_values_and_several_calls() {
    let entry = json!({"a": [1, -2.5, true, null, {"b": "c, d: {e} [f] \"g\" 'h'"}], "": {}});
    let log = json!([{"name": "log", "arguments": {"entry": entry}}]);
    let value = "{a:[1,-2.5,true,null,{b:Qc, d: {e} [f] \"g\" 'h'Q}],QQ:{}}";
    let python = "{'a': [1, -2.5, True, None, {'b': 'c, d: {e} [f] \"g\" \\'h\\''}], \"\": {}}";
    for (notation, body) in [
        (Notation::Hermes, json!({"name": "log", "arguments": {"entry": entry}}).to_string()),
        (Notation::Pythonic, format!("[log(entry={python})]")),
        (Notation::FunctionGemma, format!("call:log{{entry:{}}}", value.replace('Q', "<escape>"))),
        (Notation::Gemma4, format!("call:log{{entry:{}}}", value.replace('Q', "<|\"|>"))),
    ] {
        assert_eq!(calls(notation, &body), Some(log.clone()), "{notation:?} {body}");
    }
    let two = json!([{"name": "now", "arguments": {}}, {"name": "log", "arguments": {"entry": "]"}}]);
    assert_eq!(calls(Notation::Pythonic, "[now(), log(entry=\"]\")]"), Some(two.clone()));
    let llama = "{\"name\": \"now\", \"parameters\": {}}; {\"name\": \"log\", \"parameters\": {\"entry\": \"]\"}}";
    assert_eq!(calls(Notation::Llama3, llama), Some(two));
}

#[test]
fn p20_texts_come_back_as_they_were() {
    for text in ["\"quoted\" \\ back", "{\"a\": 1}", "}]</x>", "a: \u{e9}", "\u{1F600}", "line\nbreak\ttab", "'", "", "é\u{0}ü"]
    {
        let quoted = Value::String(text.into()).to_string();
        let escaped = "\u{1F600}".encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
        for spelled in [quoted.clone(), quoted.replace('\u{1F600}', &escaped)] {
            let expected = json!([{"name": "log", "arguments": {"entry": text}}]);
            let json = format!("{{\"name\": \"log\", \"arguments\": {{\"entry\": {spelled}}}}}");
            assert_eq!(calls(Notation::Hermes, &json), Some(expected.clone()), "{json}");
            let python = format!("[log(entry={spelled})]");
            assert_eq!(calls(Notation::Pythonic, &python), Some(expected), "{python}");
        }
    }
}

#[test]
fn what_is_no_call() {
    for (notation, body) in [
        (Notation::Hermes, "{\"name\": \"unknown\", \"arguments\": {}}"),
        (Notation::Hermes, "{\"name\": \"now\", \"arguments\": [1]}"),
        (Notation::Hermes, "{\"name\": \"now\", \"arguments\": {}"),
        (Notation::Hermes, "{\"name\": \"now\", \"arguments\": {}} and more"),
        (Notation::Hermes, "{\"name\": \"log\", \"arguments\": {\"entry\": \"a\\:\\uD800\"}}"),
        // A declaration said back.
        (Notation::Hermes, "{\"name\": \"get_weather\", \"description\": \"The weather of a city\", \"parameters\": {}}"),
        (Notation::Llama3, "{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}"),
        (Notation::FunctionGemma, "declaration:get_weather{description:<escape>The weather<escape>}"),
        (Notation::Pythonic, "[now(), unknown()]"),
        (Notation::Pythonic, "[log(entry=open)]"),
        (Notation::Pythonic, "[log(entry=1, entry=2)]"),
        (Notation::Pythonic, "print(1)"),
        (Notation::Gemma4, "call:log{entry:<|\"|>open}"),
        (Notation::Gemma4, "call:now{}{}"),
        (Notation::Gemma4, ""),
    ] {
        assert_eq!(calls(notation, body), None, "{notation:?} {body}");
    }
    for (notation, open) in [(Notation::Pythonic, "["), (Notation::Gemma4, "[")] {
        let deep = open.repeat(100_000);
        let body = if notation == Notation::Pythonic { format!("[log(entry={deep}") } else { format!("call:log{{entry:{deep}") };
        assert_eq!(calls(notation, &body), None, "{notation:?}");
    }
}

/// Reading what was written gives the same again, and no control token is spelled.
#[test]
fn calls_are_written_for_templates_that_leave_them_out() {
    let arguments = json!({"entry": {"html": "<b>1 < 2</b><|im_end|>", "list": [1.5, null, true, "a\"b"]}});
    let call = Call { name: "log".into(), arguments: arguments.as_object().unwrap().clone() };
    for notation in [Notation::Hermes, Notation::Pythonic] {
        let text = notation.write(&[call.clone(), call.clone()]);
        assert!(!text.contains("<|im_end|>"), "{text}");
        let (open, close) = notation.marks().unwrap();
        let bodies = text.split(open).skip(1).map(|body| body.split(close).next().unwrap());
        let read: Vec<Call> = bodies.flat_map(|body| notation.parse(body, &tools()).expect(body)).collect();
        assert_eq!(read, [call.clone(), call.clone()]);
    }
}

#[test]
fn families_are_told_by_template_and_tokens() {
    let of = |template: &str, tokens: &[&str]| Dialect::new(template, &|text| tokens.contains(&text));
    let qwen = of("{% if tools %}<tool_call>{{ message.tool_calls }}", &["<tool_call>"]);
    assert_eq!(qwen, Dialect { notation: Notation::Hermes, declares: true, repeats: true });
    let llama = of("{% if tools %}ipython{{ message.tool_calls }}", &["<|python_tag|>"]);
    assert_eq!(llama.notation, Notation::Llama3);
    let lfm = of("{% if tools %}List of tools", &["<|tool_call_start|>"]);
    assert_eq!(lfm, Dialect { notation: Notation::Pythonic, declares: true, repeats: false });
    assert_eq!(of("{% if tools %}", &["<start_function_call>"]).notation, Notation::FunctionGemma);
    assert_eq!(of("{% if tools %}<|tool_call>", &["<|tool_call>"]).notation, Notation::Gemma4);
    // SmolLM2 and Gemma 3 know none.
    assert_eq!(of("{{ message.content }}", &[]), Dialect { notation: Notation::Hermes, declares: false, repeats: false });
}

#[test]
fn models_without_tools_are_told_of_them() {
    let dialect = Dialect { notation: Notation::Hermes, declares: false, repeats: false };
    let asked = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Weather?")];
    let call = Call { name: "get_weather".into(), arguments: Map::from_iter([("city".into(), "Oslo".into())]) };
    let turn = crate::engine::tools::turn("", &[call], vec!["sunny".into()]);
    let messages = dialect.prepare(&[&asked[..], &turn[..]].concat(), Some(&tools()));
    assert!(messages[0].content.starts_with("Be brief.\n\nYou can call"));
    assert!(
        messages[0]
            .content
            .contains("\n{\"name\": \"get_weather\", \"description\": \"The weather of a city\", \"parameters\": {")
    );
    assert_eq!(messages[2].markup, "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>");
    assert_eq!(messages[2].tool_calls, None);
    assert_eq!((messages[3].role, messages[3].content.as_str()), (Role::User, "<tool_response>\nsunny\n</tool_response>"));
    let alone = dialect.prepare(&asked[1..], Some(&tools()));
    assert_eq!((alone.len(), alone[0].role), (2, Role::System));
    assert_eq!(dialect.prepare(&asked, None), asked);
}

#[test]
fn lists_of_tools_that_are_none() {
    let parse = |tools: Value, choice: Choice| Tools::parse(&tools, &choice, true).map_err(|e| (e.name, e.message));
    for (tools, name, words) in [
        (json!({}), "tools", "a list"),
        (json!([1]), "tools[0]", "an object"),
        (json!([{"type": "web_search"}]), "tools[0]", "web_search"),
        (json!([{"type": "function", "function": {}}]), "tools[0]", "no name"),
        (json!([{"name": "a b"}]), "tools[0]", "\"a b\""),
        (json!([{"name": "a"}, {"name": "a"}]), "tools", "two tools"),
        (json!([{"name": "a", "parameters": {"type": "array"}}]), "tools[0]", "an object"),
    ] {
        let (at, message) = parse(tools.clone(), Choice::Auto).expect_err("wrong");
        assert!(at == name && message.contains(words), "{tools}: {at}: {message}");
    }
    assert!(parse(json!([]), Choice::Auto).unwrap().is_none());
    assert!(parse(Value::Null, Choice::Auto).unwrap().is_none());
    assert!(parse(json!([{"name": "a"}]), Choice::None).unwrap().is_none());
    assert!(parse(json!([]), Choice::Required).is_err());
    assert!(parse(json!([{"name": "a"}]), Choice::Named("b".into())).is_err());
    let one = parse(json!([{"name": "a"}, {"name": "b"}]), Choice::Named("b".into())).unwrap().unwrap();
    assert!(one.list().len() == 1 && one.forced());
}

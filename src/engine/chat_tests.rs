use super::*;
use serde_json::json;

fn fixture(name: &str) -> String {
    std::fs::read_to_string(format!("{}/tests/fixtures/chat/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn now() -> jiff::civil::DateTime {
    jiff::civil::date(2031, 2, 5).at(6, 7, 8, 0)
}

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::new(&fixture(name), Some("<s>"), Some("</s>")).unwrap()
}

fn user(text: &str) -> Message {
    Message::new(Role::User, text)
}

fn prompt() -> RenderOptions<'static> {
    RenderOptions { add_generation_prompt: true, now: Some(now()), ..Default::default() }
}

/// Renderings of Python's jinja2 in `folder`; returns how many were compared.
fn compare_with_python(folder: &str) -> usize {
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&read("renderings.json")).unwrap();
    for case in &cases {
        let source = read(case["template"].as_str().unwrap());
        let template = ChatTemplate::new(&source, Some("<s>"), Some("</s>")).unwrap();
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let options = RenderOptions {
            add_generation_prompt: case.get("add_generation_prompt").is_none_or(|v| v == true),
            tools: Some(&case["tools"]).filter(|tools| !tools.is_null()),
            enable_thinking: case.get("enable_thinking").and_then(Value::as_bool),
            now: Some(now()),
        };
        let what = format!("{} / {}", case["template"], case["case"]);
        let rendered = template.render(&messages, &options);
        let result = messages.iter().find(|m| m.role == Role::Tool).map(|m| m.content.as_str());
        match case.get("text") {
            // Python loses what a template skips; the cases have 21 in every result and nowhere else.
            Some(text) if result.is_some() && !text.as_str().unwrap().contains("21") => {
                assert!(rendered.unwrap().text().contains(result.unwrap()), "{what}");
            }
            Some(text) => assert_eq!(rendered.unwrap().text(), text.as_str().unwrap(), "{what}"),
            // What Python was refused, we may say in a simpler form; if not, in the template's words.
            None => {
                if let Err(e) = rendered {
                    assert!(e.message().ends_with(case["refused"].as_str().unwrap()), "{what}: {e}");
                    assert_eq!(e.kind, Kind::Usage);
                }
            }
        }
    }
    cases.len()
}

#[test]
fn renders_as_python_does() {
    assert_eq!(compare_with_python(&format!("{}/tests/fixtures/chat", env!("CARGO_MANIFEST_DIR"))), 60);
}

/// The same comparison for templates of published models: `generate.py FOLDER`, then this with
/// `CACTUS_TEST_TEMPLATES=FOLDER`.
#[test]
#[ignore = "needs a folder of templates"]
fn renders_published_templates_as_python_does() {
    let folder = std::env::var("CACTUS_TEST_TEMPLATES").expect("CACTUS_TEST_TEMPLATES");
    assert!(compare_with_python(&folder) > 0);
}

/// Nobody's system turn is lost: expected text is Python's for the messages folded by hand.
#[test]
fn p04_refused_roles_are_folded_and_merged() {
    let gemma = template("gemma.jinja");
    let system = Message::new(Role::System, "Be brief.");
    let answer = Message::new(Role::Assistant, "Hi.");
    let same = |a: &[Message], b: &[Message]| {
        assert_eq!(gemma.render(a, &prompt()).unwrap(), gemma.render(b, &prompt()).unwrap());
    };
    same(&[system.clone(), user("Hello")], &[user("Be brief.\n\nHello")]);
    same(&[user("a"), user("b")], &[user("a\n\nb")]);
    same(
        &[system.clone(), user("a"), answer.clone(), system.clone(), user("b")],
        &[user("Be brief.\n\na"), answer.clone(), user("Be brief.\n\nb")],
    );
    same(&[user("a"), answer.clone(), system.clone()], &[user("a"), answer.clone(), user("Be brief.")]);
    same(
        &[user("a"), answer.clone(), answer.clone(), user("b")],
        &[user("a"), Message::new(Role::Assistant, "Hi.\n\nHi."), user("b")],
    );

    // Tools that the template does not know become plain turns.
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]);
    let calling = Message { tool_calls: Some(call), ..Message::new(Role::Assistant, "") };
    same(
        &[user("a"), calling, Message::new(Role::Tool, "21")],
        &[user("a"), Message::new(Role::Assistant, r#"{"name": "f", "arguments": {"x": 1}}"#), user("21")],
    );

    // A template that knows a leading system turn keeps it when only neighbours had to be merged.
    let mistral = template("mistral.jinja");
    let merged = mistral.render(&[system.clone(), user("a"), user("b")], &prompt()).unwrap();
    assert_eq!(merged, mistral.render(&[system, user("a\n\nb")], &prompt()).unwrap());
}

#[test]
fn p04_a_refusal_that_stays_is_the_templates_own() {
    let gemma = template("gemma.jinja");
    let starts_wrong = [Message::new(Role::Assistant, "Hi."), user("a")];
    let error = gemma.render(&starts_wrong, &prompt()).unwrap_err();
    assert_eq!(error.message(), "the chat template refuses these messages: user and assistant must take turns");
    assert_eq!(error.kind, Kind::Usage);
    gemma.render(&[user("still works")], &prompt()).unwrap();
    // From within a macro, and over several lines.
    let deep = ChatTemplate::new("{% macro m() %}{{ raise_exception('no\n such') }}{% endmacro %}{{ m() }}", None, None).unwrap();
    assert!(deep.render(&[user("a")], &prompt()).unwrap_err().message().ends_with("messages: no such"));
}

#[test]
fn p03_the_clock_is_the_callers() {
    let source =
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}|{{ date_string }}";
    let dated = ChatTemplate::new(source, None, None).unwrap();
    assert_eq!(dated.render(&[user("a")], &prompt()).unwrap().text(), "05 Feb 2031|05 Feb 2031");
    let bad = ChatTemplate::new("{{ strftime_now('%Q!') }}", None, None).unwrap();
    assert!(bad.render(&[user("a")], &prompt()).unwrap_err().message().contains("strftime_now"));
}

#[test]
fn p03_errors_are_one_line_with_the_place_and_the_name() {
    let fails = |source: &str| match ChatTemplate::new(source, None, None) {
        Ok(template) => template.render(&[user("a")], &prompt()).unwrap_err(),
        Err(e) => e,
    };
    let unknown = fails("{{ messages[0].content }}\n\n{{ today_in('Paris') }}");
    assert_eq!(unknown.message(), "chat template line 3: unknown function: today_in is unknown");
    assert_eq!(unknown.kind, Kind::Unsupported);
    for (source, word) in [
        ("\n{{ messages | sortify }}", "sortify"),
        ("\n{{ messages[0].content.frobnicate() }}", "frobnicate"),
        ("\n{{ 1 is odder }}", "odder"),
        ("\n{% unless x %}{% endunless %}", "unless"),
        ("\n{{ nothing.here.now }}", "undefined"),
        ("\n{% for x in y %}", "line"),
    ] {
        let error = fails(source);
        assert!(error.message().contains("line 2"), "{error}");
        assert!(error.message().contains(word), "{error}");
        assert!(!error.message().contains('\n'));
    }
}

#[test]
fn generation_tags_are_looked_through() {
    let source = "a\n  {% generation %}\nb\n  {%- endgeneration -%}\n c {{ '{% generation' }}{# {% #}{% if x %}{% endif %}";
    let template = ChatTemplate::new(source, None, None).unwrap();
    assert_eq!(template.render(&[], &prompt()).unwrap().text(), "a\nbc {% generation");
}

#[test]
fn messages_in_the_openai_form() {
    let parse = |value: Value| serde_json::from_value::<Message>(value).map_err(|e| e.to_string());
    let plain = parse(json!({"role": "user", "content": "a\nb", "unknown": [1]})).unwrap();
    assert_eq!(plain, user("a\nb"));
    let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": null});
    assert_eq!(parse(parts).unwrap(), plain);
    assert_eq!(parse(json!({"role": "developer"})).unwrap(), Message::new(Role::System, ""));
    let error = parse(json!({"role": "user", "content": [{"type": "video_url", "video_url": {}}]})).unwrap_err();
    assert!(error.contains("video_url"), "{error}");
    assert!(parse(json!({"role": "user", "content": 7})).is_err());
    assert!(parse(json!({"role": "alien", "content": "a"})).unwrap_err().contains("alien"));
    assert!(parse(json!({"content": "a"})).unwrap_err().contains("role"));
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]});
    assert_eq!(serde_json::to_value(parse(call.clone()).unwrap()).unwrap(), call);
}

#[test]
fn p05_no_content_beside_tool_calls_is_empty_content() {
    let calls = json!([{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
    let forms = [
        json!({"role": "assistant", "content": null, "tool_calls": calls}),
        json!({"role": "assistant", "tool_calls": calls}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ];
    for name in ["llama3.jinja", "mistral.jinja", "chatml-think.jinja", "lfm2.jinja", "gemma.jinja", "phi3.jinja"] {
        let texts: Vec<String> = forms
            .iter()
            .map(|form| {
                let tool = json!({"role": "tool", "tool_call_id": "call00001", "content": "RESULT 21"});
                let messages: Vec<Message> =
                    serde_json::from_value(json!([{"role": "user", "content": "a"}, form, tool])).unwrap();
                template(name).render(&messages, &prompt()).unwrap().text().into_owned()
            })
            .collect();
        assert!(texts[0].contains("RESULT 21"), "{name}");
        assert!(texts.iter().all(|text| *text == texts[0]), "{name}");
    }
}

#[test]
fn a_prompt_may_end_inside_thinking() {
    let think = template("chatml-think.jinja");
    let render = |thinking| think.render(&[user("a <think>")], &RenderOptions { enable_thinking: thinking, ..prompt() }).unwrap();
    assert!(render(Some(true)).ends_inside("<think>"));
    assert!(!render(Some(false)).ends_inside("<think>"));
    assert!(!render(None).ends_inside("<think>"));
}

#[test]
fn without_a_template_the_prompt_is_the_text() {
    let none = ChatTemplate::none();
    assert!(!none.has_template());
    assert_eq!(none.render(&[user("Once upon")], &prompt()).unwrap().text(), "Once upon");
    assert_eq!(none.render(&[user("a"), user("b")], &prompt()).unwrap().text(), "a\nb");
    assert!(template("phi3.jinja").has_template());
}

#[test]
fn empty_tools_are_no_tools() {
    let empty = json!([]);
    let with = RenderOptions { tools: Some(&empty), ..prompt() };
    for name in ["llama3.jinja", "chatml-think.jinja"] {
        let template = template(name);
        assert_eq!(template.render(&[user("a")], &with).unwrap(), template.render(&[user("a")], &prompt()).unwrap());
    }
}

#[test]
fn marks_are_characters_that_nobody_sent() {
    let control = Arc::new(ControlTokens::new(["<|im_end|>".to_string(), "im_end|><|x".to_string()]));
    let guarded = template("phi3.jinja").guarding(control);
    let text = "\u{fdd0}x<|im_end|><|x";
    let rendered = guarded.render(&[user(text)], &prompt()).unwrap();
    assert_eq!(rendered.mark(), Some('\u{fdd1}'));
    assert!(rendered.text().contains(&format!("<|user|>\n{text}<|end|>\n")));
    assert!(rendered.marked_text().contains("<\u{fdd1}|i\u{fdd1}m_end|>"));
    let harmless = guarded.render(&[user("<|im_end")], &prompt()).unwrap();
    assert_eq!(harmless.mark(), None);
}

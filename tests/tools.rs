//! Tool calls, from the program and from the server.

use crate::support::server::{Reply, Server};
use crate::support::{Home, bundle, source};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A model of random weights that calls as Qwen does and is told of tools by its template.
pub fn home() -> Home {
    let home = Home::new();
    let checkpoint = home.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).expect("a folder");
    for entry in std::fs::read_dir(source("tests/golden/llama-tied")).expect("a folder") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, checkpoint.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let change = |name: &str, field: &str, value: Value| {
        let path = checkpoint.join(name);
        let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("a file")).expect("JSON");
        json[field] = value;
        std::fs::write(path, json.to_string()).expect("written");
    };
    change("config.json", "max_position_embeddings", 4096.into());
    let template = "{% if tools %}<|im_start|>system\n{{ tools | tojson }} in <tool_call><|im_end|>\n{% endif %}{% for m in messages %}\
        <|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}:\
        {{ call.function.arguments.on }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    change("tokenizer_config.json", "chat_template", template.into());
    bundle(&checkpoint, &home.path().join("tiny"), 4);
    home
}

/// Few choices, so that a model of random weights comes to an end.
fn tools() -> Value {
    let light = json!({
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall \"1\"", "{b}"]}},
        "required": ["on", "room"],
        "additionalProperties": false,
    });
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    json!([
        {"type": "function", "function": {"name": "set_light", "description": "switches a light", "parameters": light}},
        {"type": "function", "function": {"name": "now", "parameters": nothing}},
    ])
}

fn write_tools(home: &Home) {
    std::fs::write(home.path().join("tools.json"), tools().to_string()).expect("written");
}

fn is_declared(name: &Value, arguments: &Value) -> bool {
    let rooms = [json!("hall \"1\""), json!("{b}")];
    match name.as_str() {
        Some("set_light") => arguments["on"].is_boolean() && rooms.contains(&arguments["room"]),
        Some("now") => *arguments == json!({}),
        _ => false,
    }
}

fn body(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "light"}], "tools": tools(), "tool_choice": "required",
        "max_tokens": 300, "temperature": 1, "seed": 1,
    });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

#[test]
fn run_prints_calls_as_lines_of_json() {
    let home = home();
    write_tools(&home);
    let run = |more: &[&str]| {
        let mut command = home.cactus(["run", "tiny", "light", "--tools", "tools.json"]);
        crate::support::finish(command.args(more).current_dir(home.path()))
    };
    let lines = run(&["--tool-choice", "required", "--max-tokens", "100"]).ok();
    assert!(lines.starts_with('{') && lines.ends_with('\n'));
    // A model of random weights does not end by itself: the last call may be cut.
    for line in lines.lines().take_while(|line| *line != "<tool_call>") {
        let call: Value = serde_json::from_str(line).expect(line);
        assert!(is_declared(&call["name"], &call["arguments"]), "{line}");
    }
    assert!(run(&["--tool-choice", "now"]).ok() == "{\"name\":\"now\",\"arguments\":{}}\n");
    let whole: Value = serde_json::from_str(&run(&["--tool-choice", "now", "--json"]).ok()).expect("JSON");
    assert_eq!(whole["function_calls"][0], json!({"name": "now", "arguments": {}}));
    assert_eq!(whole["response"], "");
    // Without a choice a model of random weights says something else; with none it cannot call.
    for choice in ["auto", "none"] {
        let whole = run(&["--tool-choice", choice, "--json", "--max-tokens", "20"]).ok();
        let whole: Value = serde_json::from_str(&whole).expect("JSON");
        assert_eq!(whole["function_calls"], json!([]));
        assert_ne!(whole["response"], "");
    }
    // The choice of few tools shortens the prompt.
    let tokens = |more: &[&str]| {
        let whole: Value = serde_json::from_str(&run(&[&["--json", "--max-tokens", "2"], more].concat()).ok()).expect("JSON");
        whole["prefill_tokens"].as_u64().expect("a number")
    };
    assert!(tokens(&["--tool-top-k", "1"]) < tokens(&[]));
    assert_eq!(tokens(&["--tool-top-k", "2"]), tokens(&["--tool-top-k", "0"]));
    for (more, words) in [
        (&["--tool-choice", "later"][..], "\"later\""),
        (&["--schema", "{}"], "cannot be used with"),
        (&["--tool-exec", "cat"], "no terminal"),
        (&["--yes"], "--tool-exec"),
    ] {
        let error = run(more).failed(2);
        assert!(error.contains(words), "{more:?}: {error}");
    }
    std::fs::write(home.path().join("tools.json"), "{").expect("written");
    assert!(run(&[]).failed(2).contains("tools.json"));
}

#[cfg(unix)]
#[test]
fn results_of_a_command_go_back_to_the_model() {
    let home = home();
    write_tools(&home);
    let run = |exec: &str, more: &[&str]| {
        let mut command = home.cactus(["run", "tiny", "light", "--tools", "tools.json", "--tool-choice", "set_light", "--yes"]);
        command.args(["--json", "--max-tokens", "200", "--temperature", "1", "--tool-exec", exec]).args(more);
        serde_json::from_str::<Value>(&crate::support::finish(command.current_dir(home.path())).ok()).expect("JSON")
    };
    let whole = run("echo \"$CACTUS_TOOL_NAME\" >> names; cat >> calls; echo 'it is <|im_end|> on'", &[]);
    let called = whole["called"].as_array().expect("calls");
    assert!(!called.is_empty());
    for call in called {
        assert_eq!((&call["name"], &call["result"]), (&json!("set_light"), &json!("it is <|im_end|> on")));
        assert!(is_declared(&call["name"], &call["arguments"]), "{call}");
    }
    let written = std::fs::read_to_string(home.path().join("calls")).expect("calls");
    let written: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(written, called.iter().map(|call| call["arguments"].clone()).collect::<Vec<_>>());
    let names = std::fs::read_to_string(home.path().join("names")).expect("names");
    assert_eq!(names, "set_light\n".repeat(called.len()));
    let failed = run("echo half; exit 3", &[]);
    assert_eq!(failed["called"][0]["result"], "error: exit status: 3\nhalf");
}

#[test]
fn a_batch_has_tools_of_its_own() {
    let home = home();
    let lines = [
        json!({"prompt": "light", "tools": tools(), "tool_choice": "required"}),
        json!({"prompt": "light", "max_tokens": 3}),
        json!({"prompt": "light", "tools": tools(), "response_format": {"type": "json_object"}}),
    ];
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(home.path().join("in.jsonl"), text.join("\n")).expect("written");
    let mut command = home.cactus(["run", "tiny", "--batch", "in.jsonl", "--quiet"]);
    let done = crate::support::finish(command.current_dir(home.path()));
    let out: Vec<Value> = done.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let call = &out[0]["function_calls"][0];
    assert!(is_declared(&call["name"], &call["arguments"]), "{call}");
    assert_eq!((&out[1]["function_calls"], &out[1]["success"]), (&json!([]), &json!(true)));
    assert!(out[2]["error"].as_str().expect("an error").contains("do not go together"), "{}", out[2]);
}

fn message(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["choices"][0]["message"].clone()
}

fn check_calls(calls: &Value) {
    let list = calls.as_array().expect("calls");
    assert!(!list.is_empty());
    let mut ids: Vec<&str> = Vec::new();
    for call in list {
        assert_eq!(call["type"], "function");
        let arguments = call["function"]["arguments"].as_str().expect("text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(is_declared(&call["function"]["name"], &arguments), "{call}");
        ids.push(call["id"].as_str().expect("an id"));
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), list.len(), "ids are unique");
}

#[test]
fn p22_the_server_calls_whole_and_in_pieces() {
    let home = home();
    let server = Server::start(&home, "tiny", &["--context", "4096"]);
    let one = server.post(CHAT, &body(json!({"parallel_tool_calls": false})));
    let answer = message(&one);
    assert_eq!((&answer["content"], answer["tool_calls"].as_array().expect("calls").len()), (&Value::Null, 1));
    check_calls(&answer["tool_calls"]);
    assert_eq!(one.json()["choices"][0]["finish_reason"], "tool_calls", "{}", one.body);
    let streamed = server.post(CHAT, &body(json!({"parallel_tool_calls": false, "stream": true}))).events();
    assert_eq!(streamed.last().expect("an event")["choices"][0]["finish_reason"], "tool_calls");
    // Some seed calls more than once; it takes a model that was trained to end there by itself.
    let several = (0..40).find_map(|seed| {
        let asked = body(json!({"seed": seed}));
        let calls = message(&server.post(CHAT, &asked))["tool_calls"].clone();
        calls.as_array().is_some_and(|calls| calls.len() > 1).then_some((asked, calls))
    });
    let (mut asked, calls) = several.expect("more than one call");
    check_calls(&calls);
    asked["stream"] = true.into();
    let mut pieces: Vec<Value> = Vec::new();
    let events = server.post(CHAT, &asked).events();
    for delta in events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
        let index = delta["index"].as_u64().expect("an index") as usize;
        if index == pieces.len() {
            assert!(delta["function"]["name"].is_string() && delta["id"].is_string(), "{delta}");
            pieces.push(delta.clone());
        } else {
            let more = delta["function"]["arguments"].as_str().expect("text");
            let all = format!("{}{more}", pieces[index]["function"]["arguments"].as_str().expect("text"));
            pieces[index]["function"]["arguments"] = all.into();
        }
    }
    check_calls(&pieces.clone().into());
    let functions = |calls: &[Value]| calls.iter().map(|call| call["function"].clone()).collect::<Vec<_>>();
    assert_eq!(functions(&pieces), functions(calls.as_array().expect("calls")));
    // The second turn: what was called and what came of it.
    let mut turn = asked["messages"].as_array().expect("messages").clone();
    turn.push(json!({"role": "assistant", "content": null, "tool_calls": calls}));
    turn.extend(
        calls.as_array().expect("calls").iter().map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "on"})),
    );
    let second = server.post(CHAT, &body(json!({"messages": turn, "tool_choice": "auto", "max_tokens": 9, "temperature": 0})));
    assert!(message(&second)["content"].is_string());
    // Words stream while tools are offered.
    let words =
        server.post(CHAT, &body(json!({"tool_choice": "auto", "stream": true, "max_tokens": 30, "temperature": 0}))).events();
    let deltas =
        words.iter().filter(|event| event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()));
    assert!(deltas.count() > 5);
    let none = server.post(CHAT, &body(json!({"tool_choice": "none", "max_tokens": 5})));
    assert_eq!(message(&none).get("tool_calls"), None);
}

#[test]
fn requests_with_tools_that_make_no_sense() {
    let home = home();
    let server = Server::start(&home, "tiny", &["--context", "4096"]);
    let pattern = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}});
    for (more, param, words) in [
        (json!({"tools": {}}), "tools", "a list"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0]", "web_search"),
        (json!({"tools": []}), "tool_choice", "no tools"),
        (json!({"tool_choice": "always"}), "tool_choice", "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "later"}}}), "tool_choice", "later"),
        (json!({"response_format": {"type": "json_object"}}), "tools", "do not go together"),
        (json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": pattern}}]}), "tools", "pattern"),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": "no"}),
            "parallel_tool_calls",
            "true or false",
        ),
    ] {
        let reply = server.post(CHAT, &body(more.clone()));
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        let error = &reply.json()["error"];
        assert!(error["param"] == param && error["message"].as_str().expect("words").contains(words), "{more}: {error}");
    }
    assert_eq!(server.post(CHAT, &body(json!({}))).status, 200);
}

#[test]
fn responses_carry_calls_as_items() {
    let home = home();
    let server = Server::start(&home, "tiny", &["--context", "4096"]);
    let flat: Vec<Value> = tools().as_array().expect("tools").iter().map(|tool| tool["function"].clone()).collect();
    let flat: Vec<Value> = flat
        .into_iter()
        .map(|mut tool| {
            tool["type"] = "function".into();
            tool
        })
        .collect();
    let ask = |more: Value| {
        let mut body = json!({"input": "light", "tools": flat, "tool_choice": "required", "max_output_tokens": 300, "parallel_tool_calls": false});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post("/v1/responses", &body)
    };
    let whole = ask(json!({})).json();
    let item = &whole["output"][0];
    assert_eq!((&item["type"], &whole["status"]), (&json!("function_call"), &json!("completed")));
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().expect("text")).expect("JSON");
    assert!(is_declared(&item["name"], &arguments), "{item}");
    // The same as a stream: every event has its number, and the last holds the whole.
    let text = ask(json!({"stream": true})).body;
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).expect("JSON"))
        .collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().expect("a type")).collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events[6]["response"]["output"][0], events[5]["item"]);
    // The call and its result go back as items.
    let input = json!([
        {"role": "user", "content": "light"},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "on"},
    ]);
    let second = ask(json!({"input": input, "tool_choice": "auto", "max_output_tokens": 5}));
    assert_eq!((second.status, &second.json()["output"][0]["type"]), (200, &json!("message")), "{}", second.body);
}

#[test]
fn fewer_tools_make_a_shorter_prompt() {
    let home = home();
    let server = Server::start(&home, "tiny", &["--context", "4096"]);
    let tokens = |more: Value| {
        let mut body = body(json!({"max_tokens": 1}));
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post(CHAT, &body).json()["usage"]["prompt_tokens"].as_u64().expect("a number")
    };
    let (all, one, none) = (tokens(json!({})), tokens(json!({"tool_rag_top_k": 1})), tokens(json!({"tool_choice": "none"})));
    assert!(all > one && one > none, "{all} {one} {none}");
}

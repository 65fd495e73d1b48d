//! `cactus serve` from outside.

use crate::support::server::{Reply, Server, request};
use crate::support::{Home, bundle, source};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn home(model: &str) -> Home {
    let home = Home::new();
    bundle(&source(&format!("tests/golden/{model}")), &home.path().join("tiny"), 4);
    home
}

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn content(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["choices"][0]["message"]["content"].as_str().expect("a text").to_owned()
}

/// The pieces of a stream put together.
fn joined(events: &[Value]) -> String {
    events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect()
}

#[test]
fn answers_whole_and_in_pieces_are_the_programs_own() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let whole = server.post(CHAT, &chat("one two three", json!({})));
    let own = home.cactus(["run", "tiny", "--json", "--max-tokens", "12", "--prompt", "one two three"]);
    let own: Value = {
        let mut own = own;
        serde_json::from_str(&crate::support::finish(own.current_dir(home.path())).ok()).expect("JSON")
    };
    assert_eq!(content(&whole), own["response"].as_str().expect("a text"));
    let whole = whole.json();
    assert_eq!(whole["confidence"], own["confidence"]);
    assert_eq!((&whole["object"], &whole["cloud_handoff"]), (&json!("chat.completion"), &json!(false)));
    let usage = &whole["usage"];
    assert_eq!(usage["prompt_tokens"], own["prefill_tokens"]);
    assert_eq!(usage["completion_tokens"], 12);
    for more in [json!({}), json!({"stream_options": {"include_usage": true}})] {
        let mut body = chat("one two three", json!({"stream": true}));
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let reply = server.post(CHAT, &body);
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        assert_eq!(joined(&reply.events()), own["response"].as_str().expect("a text"));
    }
    let listed = server.get("/v1/models").json();
    let id = listed["data"][0]["id"].as_str().expect("an id").to_owned();
    assert_eq!(server.get(&format!("/v1/models/{id}")).json()["id"], listed["data"][0]["id"]);
    for (name, status) in [(id.as_str(), 200), ("tiny", 200), ("default", 200), ("", 200), ("gpt-4o", 404)] {
        assert_eq!(server.post(CHAT, &chat("x", json!({"model": name}))).status, status, "{name}");
    }
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    assert!(server.get("/").body.contains("<title>cactus</title>"));
}

#[test]
fn several_choices_prompts_and_probabilities() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &["--slots", "3"]);
    let reply = server.post(CHAT, &chat("one", json!({"n": 4, "temperature": 1, "seed": 3}))).json();
    let choices = reply["choices"].as_array().expect("choices");
    let texts: Vec<&str> = choices.iter().map(|c| c["message"]["content"].as_str().expect("a text")).collect();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64()).collect::<Vec<_>>(), [Some(0), Some(1), Some(2), Some(3)]);
    assert!(texts[1..].iter().any(|text| *text != texts[0]), "{texts:?}");
    assert_eq!(reply["usage"]["completion_tokens"], 48);
    // The same seed gives the same answer again, and the second choice is that of the next seed.
    let again = server.post(CHAT, &chat("one", json!({"temperature": 1, "seed": 4})));
    assert_eq!(content(&again), texts[1]);

    let reply = server.post(CHAT, &chat("one", json!({"logprobs": true, "top_logprobs": 3}))).json();
    let tokens = reply["choices"][0]["logprobs"]["content"].as_array().expect("tokens");
    assert_eq!(tokens.len(), 12);
    let mut bytes = Vec::new();
    for token in tokens {
        let top = token["top_logprobs"].as_array().expect("a list");
        assert_eq!((top.len(), &top[0]["logprob"]), (3, &token["logprob"]), "temperature 0 takes the likeliest");
        bytes.extend(token["bytes"].as_array().expect("bytes").iter().map(|b| b.as_u64().expect("a byte") as u8));
    }
    assert_eq!(String::from_utf8_lossy(&bytes), reply["choices"][0]["message"]["content"].as_str().expect("a text"));
    let events = server.post(CHAT, &chat("one", json!({"logprobs": true, "stream": true}))).events();
    let streamed = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().count();
    assert_eq!(streamed, 12);

    let texts = |prompt: Value| {
        let reply = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 5, "temperature": 0}));
        assert_eq!(reply.status, 200, "{}", reply.body);
        let choices = reply.json()["choices"].as_array().expect("choices").clone();
        choices.iter().map(|c| c["text"].as_str().expect("a text").to_owned()).collect::<Vec<_>>()
    };
    let both = texts(json!(["one two", "three"]));
    assert_eq!(both, [texts(json!("one two")), texts(json!("three"))].concat());
    assert_eq!(texts(json!([[5, 6, 7], [8]])), [texts(json!([5, 6, 7])), texts(json!([8]))].concat());
}

#[test]
fn responses_are_answered_too() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let expected = content(&server.post(CHAT, &chat("one two three", json!({}))));
    let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "one two three"}]}]);
    for input in [json!("one two three"), input] {
        let body = json!({"input": input, "max_output_tokens": 12, "temperature": 0});
        let whole = server.post("/v1/responses", &body).json();
        assert_eq!(whole["output"][0]["content"][0]["text"], expected.as_str());
        assert_eq!((&whole["status"], &whole["usage"]["output_tokens"]), (&json!("incomplete"), &json!(12)));
    }
    let body = json!({"input": "one two three", "max_output_tokens": 12, "temperature": 0, "stream": true});
    let reply = server.post("/v1/responses", &body);
    let events: Vec<Value> =
        reply.body.split("\n\n").filter_map(|e| serde_json::from_str(e.split_once("data: ")?.1).ok()).collect();
    let numbers: Vec<u64> = events.iter().map(|e| e["sequence_number"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let text: String =
        events.iter().filter(|e| e["type"] == "response.output_text.delta").filter_map(|e| e["delta"].as_str()).collect();
    assert_eq!(text, expected);
    let last = events.last().expect("events");
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["content"][0]["text"]),
        (&json!("response.incomplete"), &json!(expected))
    );
    let refused = server.post("/v1/responses", &json!({"input": "x", "previous_response_id": "resp_1"}));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("previous_response_id")));
}

/// User report P10: pieces are whole characters, and together the whole.
#[test]
fn p10_streams_are_valid_text() {
    let home = home("gemma3-text");
    let server = Server::start(&home, "tiny", &[]);
    for seed in 0..6 {
        let body = chat("größer 木", json!({"temperature": 1.5, "seed": seed, "max_tokens": 60}));
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let events = server.post(CHAT, &streamed).events();
        assert_eq!(joined(&events), content(&server.post(CHAT, &body)));
    }
}

/// User report P13: the same request gives the same bytes, whatever was asked before and meanwhile.
#[test]
fn p13_the_same_request_has_the_same_answer() {
    let home = home("qwen3");
    let server = Server::start(&home, "tiny", &["--slots", "2"]);
    for more in [json!({}), json!({"temperature": 0.9, "seed": 11, "top_p": 0.9})] {
        let body = chat("one two three four five", more);
        let first = content(&server.post(CHAT, &body));
        std::thread::scope(|scope| {
            for i in 0..10 {
                let (server, body, first) = (&server, &body, &first);
                scope.spawn(move || {
                    server.post(CHAT, &chat(&format!("one two three {i}"), json!({"temperature": 1})));
                    assert_eq!(&content(&server.post(CHAT, body)), first);
                    assert_eq!(&content(&server.post(CHAT, body)), first);
                });
            }
        });
    }
}

/// User report P16: a prompt that does not fit is refused with its size, also in a stream.
#[test]
fn p16_a_prompt_too_long_is_refused() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &["--context", "64"]);
    for stream in [false, true] {
        let reply = server.post(CHAT, &chat(&"word ".repeat(200), json!({"stream": stream})));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")), "{}", reply.body);
        assert!(error["message"].as_str().is_some_and(|m| m.contains("context of 64")), "{}", reply.body);
    }
    let full = server.post(CHAT, &chat("one", json!({"max_tokens": 1000}))).json();
    assert_eq!((&full["choices"][0]["finish_reason"], &full["usage"]["total_tokens"]), (&json!("length"), &json!(65)));
}

/// User report P18: the answer is cut before a stop text, whole and in a stream.
#[test]
fn p18_stop_texts_are_never_seen() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let whole = content(&server.post(CHAT, &chat("one two", json!({"max_tokens": 40}))));
    let characters: Vec<char> = whole.chars().collect();
    for from in [3, 9, 17] {
        let stop: String = characters[from..from + 3].iter().collect();
        let expected = whole.split_once(&stop).expect("it is there").0;
        for stream in [false, true] {
            let reply =
                server.post(CHAT, &chat("one two", json!({"max_tokens": 40, "stop": [stop, "nowhere"], "stream": stream})));
            let (text, reason) = if stream {
                let events = reply.events();
                let reason = events.last().expect("an event")["choices"][0]["finish_reason"].clone();
                (joined(&events), reason)
            } else {
                (content(&reply), reply.json()["choices"][0]["finish_reason"].clone())
            };
            assert_eq!((text.as_str(), reason), (expected, json!("stop")), "{stop:?}");
        }
    }
}

/// User report P28: token counts come last in a stream that asks for them, and a limit is called one.
#[test]
fn p28_usage_and_finish_reasons() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let body = chat("one", json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5}));
    let events = server.post(CHAT, &body).events();
    let (last, others) = events.split_last().expect("events");
    assert_eq!(last["choices"], json!([]));
    let count = |name: &str| last["usage"][name].as_u64().expect("a number");
    assert_eq!((count("completion_tokens"), count("prompt_tokens") + 5), (5, count("total_tokens")));
    assert!(others.iter().all(|e| e["usage"].is_null() && e["choices"][0].is_object()));
    assert_eq!(others.last().expect("events")["choices"][0]["finish_reason"], "length");
    assert!(others[..others.len() - 1].iter().all(|e| e["choices"][0]["finish_reason"].is_null()));
    assert_eq!(others[0]["choices"][0]["delta"]["role"], "assistant");
}

/// User report P30: what ordinary clients send is understood.
#[test]
fn p30_parts_nulls_and_unknown_fields() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let plain = json!({"messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c\nd"}],
        "max_tokens": 9, "temperature": 0});
    let expected = content(&server.post(CHAT, &plain));
    let parts = |a: &str, b: &str| json!([{"type": "text", "text": a}, {"type": "text", "text": b}]);
    let body = json!({
        "messages": [{"role": "system", "content": parts("a", "b")}, {"role": "user", "content": parts("c", "d"), "name": null}],
        "max_completion_tokens": 9, "max_tokens": null, "temperature": 0.0, "top_p": null, "stop": null, "tools": null, "n": null,
        "seed": null, "stream": null, "stream_options": null, "logprobs": null, "user": "me", "store": false, "metadata": {"a": 1},
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "service_tier": "auto", "something_new": [1],
    });
    assert_eq!(content(&server.post(CHAT, &body)), expected);
    for (part, name) in [(json!({"type": "hologram"}), "hologram"), (json!({"text": "x"}), "type"), (json!(7), "type")] {
        let reply = server.post(CHAT, &json!({"messages": [{"role": "user", "content": [part]}]}));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!("messages[0]")), "{}", reply.body);
        assert!(error["message"].as_str().is_some_and(|m| m.contains(name)), "{}", reply.body);
    }
}

/// User report P31: an allowed page may read every sort of reply; others are refused before anything is done.
#[test]
fn p31_pages_that_are_allowed_and_others() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &["--allow-origin", "https://app.example", "--api-key", "secret"]);
    let ask = ("access-control-request-method", "POST");
    let asked = ("access-control-request-headers", "authorization,x-stainless-lang");
    let mine = ("origin", "https://app.example");
    let reply = server.send("OPTIONS", CHAT, &[mine, ask, asked], b"");
    assert_eq!((reply.status, reply.header("access-control-allow-headers")), (204, Some("authorization,x-stainless-lang")));
    assert!(reply.header("access-control-allow-methods").is_some_and(|m| m.contains("POST")));
    let key = ("authorization", "Bearer secret");
    let body = chat("one", json!({})).to_string();
    let stream = chat("one", json!({"stream": true})).to_string();
    for (headers, body, status) in [
        (vec![mine, key], body.as_str(), 200),
        (vec![mine, key], stream.as_str(), 200),
        (vec![mine, key], "{", 400),
        (vec![mine], body.as_str(), 401),
    ] {
        let reply = server.send("POST", CHAT, &headers, body.as_bytes());
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (status, Some("https://app.example")));
    }
    for headers in [[key, ("origin", "https://evil.example")], [key, ("host", "evil.example:80")]] {
        let reply = server.send("POST", CHAT, &headers, body.as_bytes());
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (403, None), "{}", reply.body);
    }
    let own = format!("127.0.0.1:{}", server.port);
    let page = format!("http://{own}");
    assert_eq!(server.send("POST", CHAT, &[key, ("host", &own), ("origin", &page)], body.as_bytes()).status, 200);
    assert_eq!(server.send("GET", "/v1/models", &[("x-api-key", "secret")], b"").status, 200);
    assert_eq!(server.send("GET", "/v1/models", &[("authorization", "Bearer Secret")], b"").status, 401);
    assert_eq!((server.get("/health").status, server.get("/metrics").status), (200, 401));
}

/// User report P33: bodies of many megabytes are read; what is too large says so.
#[test]
fn p33_large_bodies() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let mut body = chat("one", json!({}));
    body["photo"] = "A".repeat(20 << 20).into();
    assert_eq!(server.post(CHAT, &body).status, 200);
    drop(server);
    let server = Server::start(&home, "tiny", &["--body-limit", "1000"]);
    body["photo"] = "A".repeat(2000).into();
    let reply = server.post(CHAT, &body);
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (413, &json!("body_too_large")));
    // The same without a length in the head.
    let text = body.to_string();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len());
    assert_eq!(server.raw((head + &chunk).as_bytes()).status, 413);
    let begin = Instant::now();
    while !server.log().contains("413") {
        assert!(begin.elapsed() < Duration::from_secs(10), "{}", server.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// User report P34: who goes away is not worked for: while it is written, while it waits, with and without a stream.
#[test]
fn p34_callers_that_go_away() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &["--slots", "1"]);
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    for stream in [true, false] {
        let left = server.metric("answers_left_total");
        // Many answers to one request keep the slot busy for long enough to be seen.
        let body = chat("one", json!({"max_tokens": 200, "n": 16, "stream": stream})).to_string();
        let bytes = request("POST", CHAT, &[], body.as_bytes());
        let open = || {
            let mut stream = server.connect();
            stream.write_all(&bytes).expect("written");
            stream
        };
        let (first, second) = (open(), open());
        wait("nothing is done", &|| server.metric("slots_busy") == 1 && server.metric("jobs_waiting") > 16);
        drop((first, second));
        wait("a slot is still busy", &|| server.metric("slots_busy") == 0 && server.metric("jobs_waiting") == 0);
        assert!(server.metric("answers_left_total") > left);
    }
    assert_eq!(server.post(CHAT, &chat("one", json!({}))).status, 200);
}

/// User report P35: what is wrong is the caller's fault, says where, and comes before a stream begins.
#[test]
fn p35_wrong_requests() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let message = json!([{"role": "user", "content": "one"}]);
    let field = |name: &str, value: Value| {
        let mut body = chat("one", json!({"stream": true}));
        body[name] = value;
        body.to_string()
    };
    for (body, param) in [
        ("{".to_owned(), "body"),
        ("".to_owned(), "body"),
        ("[]".to_owned(), "body"),
        ("\u{0}\u{1}".to_owned(), "body"),
        ("[".repeat(100_000), "body"),
        (json!({"messages": "x"}).to_string(), "messages"),
        (json!({"messages": []}).to_string(), "messages"),
        (json!({"stream": true}).to_string(), "messages"),
        (json!({"messages": [message[0], {"role": "wizard"}]}).to_string(), "messages[1]"),
        (field("temperature", json!("hot")), "temperature"),
        (field("temperature", json!(-1)), "temperature"),
        (field("temperature", json!(1e40)), "temperature"),
        (field("top_p", json!(2)), "top_p"),
        (field("n", json!(0)), "n"),
        (field("n", json!(1_000_000)), "n"),
        (field("max_tokens", json!(-5)), "max_tokens"),
        (field("max_tokens", json!(0)), "max_tokens"),
        (field("stop", json!({})), "stop"),
        (field("stop", json!([""])), "stop"),
        (field("seed", json!("x")), "seed"),
        (field("stream", json!("yes")), "stream"),
        (field("logprobs", json!(3)), "logprobs"),
        (field("logit_bias", json!({"5": 1})), "logit_bias"),
        (field("model", json!(7)), "model"),
    ] {
        let reply = server.send("POST", CHAT, &[], body.as_bytes());
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{}", reply.body);
        assert!(error["type"] == "invalid_request_error" && error["message"].is_string() && error.get("code").is_some());
    }
    let lost = server.get("/v1/nothing");
    assert_eq!((lost.status, &lost.json()["error"]["code"]), (404, &json!("not_found")));
    let wrong = server.get(CHAT);
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (405, &json!("method_not_allowed")));
    for bytes in [
        &b"nonsense\r\n\r\n"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ] {
        let reply = server.raw(bytes);
        assert!(reply.status < 500, "{reply:?}");
    }
    assert_eq!(server.post(CHAT, &chat("one", json!({}))).status, 200);
}

/// More than may wait are told to come back later; the rest is answered.
#[test]
fn a_full_queue_says_so() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &["--slots", "1", "--queue", "2"]);
    let replies: Vec<Reply> = std::thread::scope(|scope| {
        let ask = |_| scope.spawn(|| server.post(CHAT, &chat("one", json!({"max_tokens": 200}))));
        (0..24).map(ask).collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("a reply")).collect()
    });
    let refused: Vec<&Reply> = replies.iter().filter(|reply| reply.status == 429).collect();
    assert!(!refused.is_empty() && replies.iter().filter(|reply| reply.status == 200).count() >= 3);
    assert_eq!(replies.len(), refused.len() + replies.iter().filter(|reply| reply.status == 200).count());
    assert_eq!(refused[0].header("retry-after"), Some("1"));
    assert_eq!(refused[0].json()["error"]["code"], "queue_full");
}

/// A server that is told to end finishes its streams and takes nothing new.
#[cfg(unix)]
#[test]
fn an_ending_server_finishes_what_it_began() {
    let home = home("llama-tied");
    let mut server = Server::start(&home, "tiny", &["--slots", "2"]);
    let body = chat("one", json!({"max_tokens": 220, "n": 8, "stream": true})).to_string();
    let mut stream = server.connect();
    stream.write_all(&request("POST", CHAT, &[], body.as_bytes())).expect("written");
    let mut begun = [0; 100];
    stream.read_exact(&mut begun).expect("it has begun");
    let id = rustix::process::Pid::from_raw(server.id() as i32).expect("a process");
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("a signal");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("to the end");
    assert!(begun.starts_with(b"HTTP/1.1 200"));
    assert_eq!((rest.matches(r#""finish_reason":"length""#).count(), rest.matches("data: [DONE]").count()), (8, 1));
    assert_eq!(server.wait(), Some(0));
    assert!(server.log().contains("stopped"), "{}", server.log());
}

#[test]
fn vectors_of_texts() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let embed = |body: Value| server.post("/v1/embeddings", &body);
    let reply = embed(json!({"input": ["one two", "three"], "model": "tiny"})).json();
    let vector = |i: usize| -> Vec<f32> { serde_json::from_value(reply["data"][i]["embedding"].clone()).expect("numbers") };
    for i in 0..2 {
        assert_eq!(reply["data"][i]["index"], i);
        assert!((vector(i).iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
    }
    assert_ne!(vector(0), vector(1));
    assert_eq!(embed(json!({"input": "three"})).json()["data"][0]["embedding"], reply["data"][1]["embedding"]);
    // As the command makes them.
    let mut command = home.cactus(["embed", "tiny", "three"]);
    let line = crate::support::finish(command.current_dir(home.path())).ok();
    let own: Vec<f32> = serde_json::from_str(&line).expect("numbers");
    assert!(own.iter().zip(vector(1)).all(|(a, b)| (a - b).abs() < 1e-6));
    let packed = embed(json!({"input": "three", "encoding_format": "base64"})).json();
    assert_eq!(packed["data"][0]["embedding"].as_str().map(str::len), Some((vector(1).len() * 4).div_ceil(3) * 4));
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": [1, "x"]}), "input"),
        (json!({"input": [4_000_000_000u32]}), "input"),
        (json!({"input": "x ".repeat(5000)}), "input"),
        (json!({"input": "x", "dimensions": 3}), "dimensions"),
        (json!({"input": "x", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "x", "model": "other"}), "model"),
    ] {
        let reply = embed(body);
        assert!([400, 404].contains(&reply.status) && reply.json()["error"]["param"] == param, "{}", reply.body);
    }
}

/// User report P25: a schema that cannot be promised is refused with its place; what comes with 200 is valid.
#[test]
fn p25_schemas_are_kept_or_refused() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    let format =
        |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    for (schema, part) in [
        (json!({"type": "string", "pattern": "(?=a)b"}), "/pattern"),
        (json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}), "/properties/a/uniqueItems"),
        (json!({"$ref": "https://example.org/x"}), "$ref"),
    ] {
        let reply = server.post(CHAT, &chat("one", format(schema)));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!("response_format")), "{}", reply.body);
        assert!(error["message"].as_str().is_some_and(|m| m.contains(part)), "{}", reply.body);
    }
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 7}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"], "additionalProperties": false});
    for seed in 0..8 {
        for stream in [false, true] {
            let mut body = chat("one", format(schema.clone()));
            for (name, value) in
                [("temperature", json!(1)), ("seed", json!(seed)), ("max_tokens", json!(60)), ("stream", json!(stream))]
            {
                body[name] = value;
            }
            let reply = server.post(CHAT, &body);
            let text = if stream { joined(&reply.events()) } else { content(&reply) };
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
            assert!(value["a"].as_i64().is_some_and(|a| (3..=7).contains(&a)), "{text}");
            assert!(value["b"] == "x" || value["b"] == "yy", "{text}");
        }
    }
    let body =
        json!({"input": "one", "temperature": 1, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}});
    let reply = server.post("/v1/responses", &body).json();
    let text = reply["output"][0]["content"][0]["text"].as_str().expect("a text");
    assert!(serde_json::from_str::<Value>(text).is_ok_and(|value| value["a"].is_i64()), "{text}");
}

/// User report P27: an answer in JSON ends with its value.
#[test]
fn p27_json_ends_with_its_value() {
    let home = home("llama-tied");
    let server = Server::start(&home, "tiny", &[]);
    for seed in 0..6 {
        let schema =
            json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let body = chat("one", json!({"response_format": format, "temperature": 1.5, "seed": seed, "max_tokens": 200}));
        let reply = server.post(CHAT, &body);
        let text = content(&reply);
        assert!(text.ends_with('}') && text.len() < 80, "{text:?}");
        assert_eq!(reply.json()["choices"][0]["finish_reason"], "stop");
    }
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 50}}, "required": ["a"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let body = chat("one", json!({"response_format": format, "temperature": 1, "max_tokens": 3}));
    assert_eq!(server.post(CHAT, &body).json()["choices"][0]["finish_reason"], "length");
}

use super::super::tokenizer::Tokenizer;
use super::*;
use serde_json::json;

/// A vocabulary of the given tokens, so that a test decides how a text is cut into them.
fn tokenizer(tokens: &[&str], decoder: Value) -> Tokenizer {
    let vocab: serde_json::Map<String, Value> = tokens.iter().enumerate().map(|(i, t)| (t.to_string(), json!(i))).collect();
    let added = json!([{"id": tokens.len(), "content": "<|end|>", "special": true, "single_word": false,
                        "lstrip": false, "rstrip": false, "normalized": false}]);
    let json = json!({"version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": decoder, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]}});
    Tokenizer::from_text(&json.to_string(), &Value::Null, None).unwrap()
}

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}

fn byte_fallback(strip: usize) -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": strip, "stop": 0}]})
}

/// GPT-2's alphabet the way its authors build it: printable bytes as themselves, the rest from U+0100 on.
fn alphabet() -> Vec<char> {
    let mut next = 0x100;
    (0..=255u32)
        .map(|byte| {
            let printable = (0x21..=0x7e).contains(&byte) || (0xa1..=0xac).contains(&byte) || (0xae..=0xff).contains(&byte);
            let code = if printable { byte } else { next };
            next += u32::from(!printable);
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// Pieces in order with the rest; and whether a stop was met.
fn stream(tokenizer: &Tokenizer, ids: &[u32], stops: &[&str]) -> (Vec<String>, bool) {
    let mut stream = TextStream::new(tokenizer, stops.iter().map(|s| s.to_string()).collect());
    let mut pieces = Vec::new();
    for &id in ids {
        let piece = stream.push(id);
        pieces.push(piece.text);
        if piece.stopped {
            assert_eq!(stream.push(ids[0]), Piece { text: String::new(), stopped: true });
            assert_eq!(stream.finish(), "");
            return (pieces, true);
        }
    }
    pieces.push(stream.finish());
    (pieces, false)
}

#[test]
fn the_byte_alphabet_is_complete() {
    for (byte, c) in alphabet().into_iter().enumerate() {
        assert_eq!(alphabet_byte(c).map(usize::from), Some(byte));
    }
    assert_eq!(alphabet_byte('\u{144}'), None);
    assert_eq!(alphabet_byte(' '), None);
    assert_eq!(alphabet_byte('\u{ad}'), None);
}

const SCRIPTS: &str = "aé ß 你好 😀👨‍👩‍👧 ᚠ\u{fffd} ക\n";

/// Two tokens that meet at every byte, and one token per byte.
#[test]
fn p10_characters_split_anywhere_come_out_whole() {
    let letters = alphabet();
    let bytes = SCRIPTS.as_bytes();
    let spelled: Vec<String> = bytes.iter().map(|&b| letters[usize::from(b)].to_string()).collect();
    let fallback: Vec<String> = bytes.iter().map(|b| format!("<0x{b:02X}>")).collect();
    for cut in 0..=bytes.len() {
        let (left, right) = (spelled[..cut].concat(), spelled[cut..].concat());
        let two = tokenizer(&["?", &left, &right], byte_level());
        let ids: Vec<u32> = [(1, &left), (2, &right)].iter().filter(|(_, t)| !t.is_empty()).map(|(i, _)| *i).collect();
        let (pieces, _) = stream(&two, &ids, &[]);
        assert_eq!(pieces.concat(), SCRIPTS);
        assert_eq!(two.decode(&ids), SCRIPTS);
        let complete = SCRIPTS.char_indices().map(|(i, _)| i).chain([bytes.len()]).filter(|&i| i <= cut).max().unwrap();
        if cut > 0 {
            assert_eq!(pieces[0], SCRIPTS[..complete], "shown as soon as complete");
        }
        // Cut short, the half character is left out, not marked.
        assert_eq!(two.decode(&ids[..1]), if cut > 0 { &SCRIPTS[..complete] } else { SCRIPTS });
    }
    for (parts, decoder) in [(&spelled, byte_level()), (&fallback, byte_fallback(1))] {
        let mut unique: Vec<&str> = parts.iter().map(String::as_str).collect();
        unique.sort_unstable();
        unique.dedup();
        let one = tokenizer(&unique, decoder);
        let ids: Vec<u32> = parts.iter().map(|t| one.token_id(t).unwrap()).collect();
        assert_eq!(stream(&one, &ids, &[]).0.concat(), SCRIPTS);
        assert_eq!(one.decode_whole(&ids), SCRIPTS);
    }
}

#[test]
fn bytes_that_are_no_text_are_marked_once() {
    let t = tokenizer(&["a", "<0xFF>", "<0xE4>", "<0xBD>", "<0xA0>"], byte_fallback(0));
    let text = |ids: &[u32]| stream(&t, ids, &[]).0.concat();
    assert_eq!(text(&[0, 1, 0]), "a\u{fffd}a");
    assert_eq!(text(&[2, 0]), "\u{fffd}a");
    assert_eq!(text(&[2, 3, 4, 1]), "你\u{fffd}");
    assert_eq!(text(&[2, 3]), "");
    // Ids past the vocabulary, as models with padded rows can give.
    assert_eq!(text(&[0, 4000, 0]), "aa");
}

/// Leading spaces as the crate's own decoding has them.
#[test]
fn the_first_space_is_the_decoders() {
    let words = ["?", "▁", "▁the", "▁▁x", "<0x20>", "a", "é"];
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let decoders =
        [byte_fallback(0), byte_fallback(1), byte_fallback(2), metaspace("first"), metaspace("always"), metaspace("never")];
    for decoder in decoders {
        let t = tokenizer(&words, decoder.clone());
        let end = t.token_id("<|end|>").unwrap();
        for first in 1..=6 {
            for second in 1..=6 {
                for ids in [vec![first], vec![first, second, first], vec![end, first, second], vec![first, end, second, 2]] {
                    let whole: Vec<u32> = ids.iter().copied().filter(|&id| id != end).collect();
                    let expected = t.decode_whole(&whole);
                    assert_eq!(stream(&t, &ids, &[]).0.concat(), expected, "{ids:?} {decoder}");
                    assert_eq!(t.decode(&ids), expected);
                }
            }
        }
    }
}

#[test]
fn other_decoders_are_followed_by_their_neighbours() {
    let word_piece = json!({"type": "WordPiece", "prefix": "##", "cleanup": false});
    for decoder in [word_piece, Value::Null] {
        let t = tokenizer(&["[UNK]", "river", "##s", "boil", "the"], decoder);
        let ids = [4, 1, 2, 3, 2, 4];
        assert_eq!(t.decode(&ids), t.decode_whole(&ids));
        assert_eq!(stream(&t, &ids, &[]).0.concat(), t.decode_whole(&ids));
    }
}

/// Every way to cut a text into tokens gives the same answer, that of a plain search in the whole text.
#[test]
fn p18_stop_strings_cut_exactly_wherever_tokens_end() {
    let letters = ["?", "a", "b", "c", "ab", "ba", "abc", "cab", "é", "aé", "bab"];
    let t = tokenizer(&letters, byte_fallback(0));
    let texts = ["abcab", "aabab", "babcabab", "abéab", "cabab", "aaab", "bbbb", "ababababc"];
    let stop_sets: [&[&str]; 10] =
        [&["abc"], &["ab", "cab"], &["bab"], &["é"], &["aé", "b"], &["ababc"], &["aab"], &["x"], &["", "c"], &["abab", "ab"]];
    for text in texts {
        let mut cuttings = vec![(0, Vec::new())];
        let mut complete = Vec::new();
        while let Some((at, ids)) = cuttings.pop() {
            if at == text.len() {
                complete.push(ids.clone());
            }
            for (id, token) in letters.iter().enumerate().skip(1) {
                if text[at..].starts_with(token) {
                    cuttings.push((at + token.len(), [ids.as_slice(), &[id as u32]].concat()));
                }
            }
        }
        for stops in &stop_sets {
            // First complete, then longest.
            let matches = stops.iter().filter(|s| !s.is_empty()).filter_map(|s| text.find(s).map(|at| (at + s.len(), at)));
            let expected = matches.min().map(|(_, at)| &text[..at]);
            for ids in &complete {
                let (pieces, stopped) = stream(&t, ids, stops);
                assert_eq!(stopped, expected.is_some(), "{text} {stops:?} {ids:?}");
                assert_eq!(pieces.concat(), expected.unwrap_or(text), "{text} {stops:?} {ids:?}");
            }
        }
    }
}

#[test]
fn p18_only_a_possible_beginning_is_held_back() {
    let t = tokenizer(&["?", "He", "llo", "\n", "Us", "er:", "x"], byte_fallback(0));
    let (pieces, stopped) = stream(&t, &[1, 2, 3, 4, 6, 3, 4, 5, 6], &["\nUser:"]);
    assert!(stopped);
    assert_eq!(pieces, ["He", "llo", "", "", "\nUsx", "", "", ""]);
    let (pieces, stopped) = stream(&t, &[1, 3, 4], &["\nUser:"]);
    assert!(!stopped);
    assert_eq!(pieces, ["He", "", "", "\nUs"], "the end of the answer frees what was held");
}

#[test]
fn special_tokens_are_silent_shown_or_stops() {
    let t = tokenizer(&["?", "a", "b"], byte_fallback(0));
    let end = t.token_id("<|end|>").unwrap();
    assert_eq!(stream(&t, &[1, end, 2], &[]).0.concat(), "ab");
    let (pieces, stopped) = stream(&t, &[1, end, 2], &["<|end|>", "ax"]);
    assert_eq!((pieces.concat().as_str(), stopped), ("a", true));
    let mut shown = TextStream::new(&t, Vec::new()).showing(vec![end]);
    let text: String = [1, end, 2].iter().map(|&id| shown.push(id).text).collect();
    assert_eq!(text, "a<|end|>b");
}

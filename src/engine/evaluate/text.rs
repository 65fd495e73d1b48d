//! What is scored: text in chunks, or the assistant's turns of chats.

use super::super::chat::{ChatTemplate, Message, RenderOptions, Role};
use super::super::tokenizer::Tokenizer;
use super::score::Sequence;
use crate::error::{Error, Result};

/// Text in consecutive chunks of `chunk` tokens; of each, the predictions made by the second half count.
///
/// As `llama-perplexity` does it (llama.cpp, tools/perplexity): the whole text is tokenised at once, with the
/// begin-of-text token in front if the model wants one; in every chunk the *first token is replaced* by that
/// token; the rows at places `chunk / 2` to `chunk - 2` are scored, each against the token that follows, which
/// are `chunk - 1 - chunk / 2` predictions a chunk; tokens that fill no chunk are left out.
pub fn chunks(tokenizer: &Tokenizer, text: &str, chunk: usize, limit: Option<usize>) -> Result<Vec<Sequence>> {
    if chunk < 4 {
        return Err(Error::usage(format!("chunks of {chunk} tokens are too short")).with_hint("give --ctx 512"));
    }
    let bos = tokenizer.bos().filter(|_| tokenizer.wants_bos());
    let mut ids: Vec<u32> = bos.into_iter().collect();
    ids.extend(tokenizer.encode(text, false)?);
    if ids.len() < chunk {
        return Err(Error::usage(format!("the text has {} tokens, a chunk needs {chunk}", ids.len()))
            .with_hint("give a longer text or a smaller --ctx"));
    }
    let sequence = |(document, ids): (usize, &[u32])| {
        let mut ids = ids.to_vec();
        if let Some(bos) = bos {
            ids[0] = bos;
        }
        Sequence { document, ids, targets: std::iter::once(chunk / 2 + 1..chunk).collect() }
    };
    Ok(ids.chunks_exact(chunk).take(limit.unwrap_or(usize::MAX)).enumerate().map(sequence).collect())
}

/// The turns of the assistant in chats, rendered by the model's template. A turn is scored from what follows
/// the prompt that would ask for it to the control token that ends it, both included; what the template writes behind
/// is not. A chat is one sequence as long as each further turn only adds to it; a template that changes what
/// was said before (leaving out old reasoning, say) makes a sequence of its own for the turn. Sequences are
/// cut at `longest` tokens.
pub fn chats(tokenizer: &Tokenizer, template: &ChatTemplate, chats: &[Vec<Message>], longest: usize) -> Result<Vec<Sequence>> {
    if !template.has_template() {
        return Err(Error::usage("this is a base model without a chat template").with_hint("give --text instead of --chat"));
    }
    let encode = |messages: &[Message], add_generation_prompt: bool| {
        let rendered = template.render(messages, &RenderOptions { add_generation_prompt, ..Default::default() })?;
        tokenizer.encode_prompt(&rendered)
    };
    let mut sequences: Vec<Sequence> = Vec::new();
    for (document, messages) in chats.iter().enumerate() {
        let mut current: Option<Sequence> = None;
        for (at, _) in messages.iter().enumerate().filter(|(at, m)| *at > 0 && m.role == Role::Assistant) {
            let prompt = encode(&messages[..at], true)?;
            let mut ids = encode(&messages[..=at], false)?;
            // A prompt may open a block that a given answer does not show; the common beginning is the prompt.
            let start = prompt.iter().zip(&ids).take_while(|(a, b)| a == b).count().max(1);
            let ends = |id: u32| tokenizer.eos_ids().contains(&id) || tokenizer.is_control(id);
            let end_token = (start..ids.len()).rev().find(|&i| ends(ids[i]));
            ids.truncate(end_token.map_or(ids.len(), |i| i + 1).min(longest));
            if start >= ids.len() {
                continue;
            }
            let target = start..ids.len();
            match &mut current {
                Some(sequence) if ids.starts_with(&sequence.ids) => {
                    let end = sequence.ids.len();
                    sequence.ids = ids;
                    sequence.targets.push(target.start.max(end)..target.end);
                }
                _ => sequences.extend(current.replace(Sequence { document, ids, targets: vec![target] })),
            }
        }
        sequences.extend(current);
    }
    if sequences.is_empty() {
        return Err(Error::usage("there is no turn of the assistant to score"));
    }
    Ok(sequences)
}

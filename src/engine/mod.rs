//! From messages to text: tokenizer, chat template, sampler, session, generation.

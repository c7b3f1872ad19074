//! A byte-level BPE of a few hundred tokens, for both file formats.

use serde_json::{Value, json};

use super::GgufWriter;
use crate::tokenizer::char_of;

/// The token that ends a sequence.
pub(super) const END: u32 = 2;
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const MERGES: [&str; 14] = [
    "t h", "th e", "Ġ the", "i n", "e r", "a n", "an d", "Ġ and", "o n", "r e", "Ġ a", "h e", "l l", "he ll",
];

/// The vocabulary by id: special tokens, the 256 bytes, and one token a merge.
pub(super) fn tokens() -> Vec<String> {
    let mut tokens: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| char_of(byte).to_string()));
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    tokens
}

pub(super) fn write_metadata(file: &mut GgufWriter) {
    let tokens = tokens();
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < SPECIAL.len() { 3 } else { 1 }).collect();
    file.string("tokenizer.ggml.model", "gpt2");
    file.string("tokenizer.ggml.pre", "smollm");
    file.strings("tokenizer.ggml.tokens", &tokens);
    file.i32s("tokenizer.ggml.token_type", &types);
    file.strings("tokenizer.ggml.merges", &MERGES);
    file.boolean("tokenizer.ggml.add_bos_token", false);
    file.u32("tokenizer.ggml.bos_token_id", 1);
    file.u32("tokenizer.ggml.eos_token_id", END);
}

pub(super) fn tokenizer_json() -> Value {
    let vocab: serde_json::Map<String, Value> =
        tokens().into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "post_processor": null, "decoder": bytes,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, bytes]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocab, "merges": MERGES},
    })
}

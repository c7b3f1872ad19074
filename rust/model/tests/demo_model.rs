//! The demo model's tokenizer and chat template against llama.cpp's ids. Needs the file that the
//! environment variable `KVRELAY_DEMO_GGUF` names.

use kvrelay_model::{ChatMessage, DType, Model};
use serde_json::Value;

fn demo() -> Option<Model> {
    match std::env::var_os("KVRELAY_DEMO_GGUF") {
        Some(path) => Some(Model::load(path).expect("the demo model")),
        None => {
            eprintln!("skipped: KVRELAY_DEMO_GGUF does not name the demo model's file");
            None
        }
    }
}

fn references() -> Value {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/llama_cpp/llama_cpp_f32_weights_f32_kv.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn loads_as_described() {
    let Some(model) = demo() else { return };
    let config = model.config();
    assert_eq!((config.num_layers, config.hidden_size, config.ffn_size), (30, 576, 1536));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab_size, config.context_length, config.rope_theta), (49_152, 8192, 100_000.0));
    assert!(model.weights().is_tied());
    assert_eq!(model.weights().embedding.dtype(), DType::Q8_0);
    assert_eq!(model.weights().layers[29].down.dtype(), DType::Q4_1);
    assert_eq!(model.end_ids(), [2]);
}

#[test]
fn tokenises_like_llama_cpp() {
    let Some(model) = demo() else { return };
    let tokenizer = model.tokenizer();
    for result in references()["results"].as_array().unwrap() {
        let prompt = result["prompt"].as_str().unwrap();
        assert_eq!(tokenizer.encode(prompt, true).unwrap(), ids(&result["prompt_ids"]), "{}", result["name"]);
        let output = ids(&result["output_ids"]);
        let text = result["output_text"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&output), text.replace("<|im_end|>", ""), "{}", result["name"]);
    }
    // Each digit alone, also those that are not ASCII; without that rule the space before a
    // number would be part of its token.
    let digits = [164, 111, 164, 112, 164, 113, 216, 16738];
    assert_eq!(tokenizer.encode("١٢٣ ½", true).unwrap(), digits);
    assert_eq!(tokenizer.encode(" ١٢٣ ½", true).unwrap(), [&[216], &digits[..]].concat());
    assert_eq!(tokenizer.encode("", true).unwrap(), [0_u32; 0]);
}

#[test]
fn chats_like_llama_cpp() {
    let Some(model) = demo() else { return };
    let references = references();
    let chats = references["results"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|r| r["prompt"].as_str().unwrap().contains("<|im_start|>user"));
    let mut seen = 0;
    for result in chats {
        let prompt = result["prompt"].as_str().unwrap();
        let (_, question) = prompt.split_once("<|im_start|>user\n").unwrap();
        let (question, _) = question.split_once("<|im_end|>").unwrap();
        let message = ChatMessage::new("user", question);
        assert_eq!(model.chat_template().unwrap().render(&[&message], true).unwrap(), prompt);
        assert_eq!(model.chat_ids(&[message]).unwrap(), ids(&result["prompt_ids"]));
        seen += 1;
    }
    assert!(seen > 0);
}

//! Hugging Face folders: damaged shards, tied embeddings, and settings that must not be ignored.

use std::path::Path;

use kvrelay_model::rope::RopeScaling;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, Model};
use serde_json::{Value, json};

const LLAMA3: RopeScaling =
    RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64.0 };

fn load(folder: &Path) -> Result<Model, String> {
    Model::load(folder).map_err(|e| e.to_string())
}

fn sharded() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    TinyLlama { shards: 3, ..TinyLlama::default() }.write_hf(folder.path()).unwrap();
    let shard = folder.path().join("model-00002-of-00003.safetensors");
    (folder, shard)
}

#[test]
fn damaged_shards_are_named_with_both_sizes() {
    let (folder, shard) = sharded();
    load(folder.path()).unwrap();
    let whole = std::fs::read(&shard).unwrap();
    let check = |bytes: &[u8], wanted: &[String]| {
        std::fs::write(&shard, bytes).unwrap();
        let error = load(folder.path()).unwrap_err();
        assert!(error.contains("model-00002-of-00003.safetensors"), "{error}");
        for text in wanted {
            assert!(error.contains(text), "{error} lacks {text}");
        }
    };
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    check(&whole[..4], &["8 bytes".into(), "a file of 4 bytes".into()]);
    check(&whole[..100], &[format!("at least {} bytes", header + 8), "100 bytes".into()]);
    let half = header + 8 + (whole.len() - header) / 2;
    check(&whole[..half], &[format!("{} bytes", whole.len()), format!("{half} bytes")]);
    let longer = [&whole[..], &[0; 16]].concat();
    check(&longer, &[format!("{} bytes", whole.len()), format!("{} bytes", whole.len() + 16)]);
    for length in (0..whole.len()).step_by(211) {
        check(&whole[..length], &[]);
    }
    std::fs::remove_file(&shard).unwrap();
    assert!(load(folder.path()).unwrap_err().contains("no such file"));
}

#[test]
fn an_index_may_not_lead_out_of_its_folder_or_lie() {
    let (folder, _) = sharded();
    let path = folder.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let change = |name: &str, shard: Option<&str>| {
        let mut index = index.clone();
        match shard {
            Some(shard) => index["weight_map"][name] = shard.into(),
            None => drop(index["weight_map"].as_object_mut().unwrap().remove(name)),
        }
        std::fs::write(&path, index.to_string()).unwrap();
        load(folder.path()).unwrap_err()
    };
    let norm = "model.norm.weight";
    assert!(
        change(norm, Some("../other.safetensors"))
            .contains("expected a file name, found ../other.safetensors")
    );
    assert!(change(norm, Some("model-00001-of-00003.safetensors")).contains("tensor model.norm.weight"));
    assert!(change(norm, None).contains("weight_map: model.norm.weight"));
}

fn with_config(change: impl Fn(&mut Value)) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    TinyLlama::default().write_hf(folder.path()).unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    load(folder.path())
}

#[test]
fn settings_that_change_the_computation_are_refused_by_name() {
    let cases = [
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ("rope_scaling", json!({"type": "dynamic", "factor": 2.0}), "dynamic"),
        ("rope_scaling", json!({"rope_type": "longrope"}), "longrope"),
        ("rope_scaling", json!({"factor": 2.0}), "rope_type"),
        ("rope_scaling", json!({"rope_type": "linear"}), "rope_scaling.factor"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0.5}), "0.5"),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
        ("attention_bias", true.into(), "attention_bias"),
        ("mlp_bias", true.into(), "mlp_bias"),
        ("hidden_act", "gelu".into(), "gelu"),
        ("model_type", "qwen2".into(), "qwen2"),
        ("sliding_window", 4096.into(), "sliding_window"),
        ("quantization_config", json!({"quant_method": "gptq"}), "gptq"),
        ("num_key_value_heads", 4.into(), "a divisor of 6, found 4"),
        ("head_dim", 15.into(), "15"),
        (
            "vocab_size",
            1000.into(),
            "model.embed_tokens.weight: expected shape [1000, 96], found shape [288, 96]",
        ),
        ("num_hidden_layers", 4.into(), "model.layers.3."),
        ("num_hidden_layers", 2.into(), "model.layers.2."),
        ("hidden_size", "96".into(), "hidden_size"),
        ("rms_norm_eps", 0.into(), "RMS epsilon"),
        ("eos_token_id", json!([2, 100_000]), "below 288, found 100000"),
    ];
    for (key, value, text) in cases {
        let error = with_config(|c| c[key] = value.clone()).unwrap_err();
        assert!(error.contains(text), "{key}: {error} lacks {text}");
    }
    with_config(|c| c["rope_scaling"] = json!({"rope_type": "default"})).unwrap();
    let newer = with_config(|c| {
        c["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0});
    });
    let newer = newer.unwrap();
    assert_eq!(
        (newer.config().rope_theta, newer.config().rope_scaling),
        (777.0, Some(RopeScaling::Linear { factor: 2.0 }))
    );
}

#[test]
fn gguf_settings_are_refused_by_name() {
    type Change = fn(&mut kvrelay_model::testing::GgufWriter);
    let cases: [(&str, Change); 7] = [
        ("add_eos_token", |f| f.boolean("tokenizer.ggml.add_eos_token", true)),
        ("general.alignment", |f| f.u32("general.alignment", 24)),
        ("yarn", |f| f.string("llama.rope.scaling.type", "yarn")),
        ("llama.expert_count", |f| f.u32("llama.expert_count", 8)),
        ("llama.attention.sliding_window", |f| f.u32("llama.attention.sliding_window", 128)),
        ("blk.0.attn_q.bias", |f| f.tensor("blk.0.attn_q.bias", &[96], DType::F32, vec![0; 384])),
        ("llama.attention.value_length", |f| f.u32("llama.attention.value_length", 8)),
    ];
    for (text, change) in cases {
        let mut file = TinyLlama::default().gguf();
        change(&mut file);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        std::fs::write(&path, file.finish()).unwrap();
        let error = load(&path).unwrap_err();
        assert!(error.contains(text), "{error} lacks {text}");
    }
}

/// Both formats give the same numbers, row by row, whatever order the file keeps them in.
#[test]
fn both_formats_hold_the_same_model() {
    for scaling in [None, Some(RopeScaling::Linear { factor: 4.0 }), Some(LLAMA3)] {
        for (tied, shards, dtype) in [(false, 1, DType::F32), (true, 1, DType::F16), (true, 3, DType::BF16)] {
            let tiny = TinyLlama { tied, shards, dtype, rope_scaling: scaling, ..TinyLlama::default() };
            let folder = tempfile::tempdir().unwrap();
            let hf = load(&tiny.write_hf(folder.path()).unwrap()).unwrap();
            let gguf = tiny.model();
            assert_eq!(hf.weights().is_tied(), tied);
            assert_eq!(gguf.weights().is_tied(), tied);
            for (a, b) in hf.weights().tensors().zip(gguf.weights().tensors()) {
                assert_eq!(a.to_f32(), b.to_f32(), "{}", b.name());
            }
            assert_eq!(hf.weights().num_bytes(), gguf.weights().num_bytes());
            let pairs = hf.config().rope_frequencies.iter().zip(&gguf.config().rope_frequencies);
            for (a, b) in pairs {
                assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
            }
            assert_eq!((hf.end_ids(), gguf.end_ids()), (&[2][..], &[2][..]));
            let message = [kvrelay_model::ChatMessage::new("user", "the end and 42")];
            assert_eq!(hf.chat_ids(&message).unwrap(), gguf.chat_ids(&message).unwrap());
        }
    }
}

#[test]
fn a_tied_embedding_is_counted_once() {
    let tied = TinyLlama { tied: true, ..TinyLlama::default() }.model();
    let untied = TinyLlama::default().model();
    let embedding = untied.weights().embedding.num_bytes();
    assert_eq!(untied.weights().num_bytes() - tied.weights().num_bytes(), embedding);
    assert_eq!(tied.weights().output().name(), "token_embd.weight");
    assert_ne!(tied.digest(), untied.digest());
    assert_eq!(untied.digest(), TinyLlama::default().model().digest());
    assert_ne!(untied.digest(), TinyLlama { seed: 1, ..TinyLlama::default() }.model().digest());
}

/// A tokenizer file may ask for truncation and padding; a prompt is left as it is.
#[test]
fn prompts_are_not_cut_or_filled_up() {
    let folder = tempfile::tempdir().unwrap();
    TinyLlama::default().write_hf(folder.path()).unwrap();
    let plain = load(folder.path()).unwrap().tokenizer().encode("the end and 42", true).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    });
    std::fs::write(&path, json.to_string()).unwrap();
    assert_eq!(load(folder.path()).unwrap().tokenizer().encode("the end and 42", true).unwrap(), plain);
    assert!(plain.len() > 2 && plain.len() < 64);
}

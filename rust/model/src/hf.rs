//! The small files of a Hugging Face folder beside its weights.

use std::path::Path;

use serde_json::Value;

use crate::{ChatTemplate, ModelError, Tokenizer};

/// The JSON file `name` of `folder`, or `None` when there is none.
pub(crate) fn read_json(folder: &Path, name: &str) -> Result<Option<Value>, ModelError> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read(&path).map_err(|e| ModelError::io(&path, e))?;
    serde_json::from_slice(&text).map(Some).map_err(|e| ModelError::field(&path, "content", "JSON", e))
}

/// The chat template of a folder: `chat_template.jinja`, or the entry of `tokenizer_config.json`.
pub(crate) fn chat_template(folder: &Path) -> Result<Option<ChatTemplate>, ModelError> {
    let config = read_json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
    let token = |name: &str| match &config[name] {
        Value::String(text) => text.clone(),
        // Older files write a token as an object with its text in `content`.
        other => other["content"].as_str().unwrap_or_default().to_owned(),
    };
    let file = folder.join("chat_template.jinja");
    let source = if file.exists() {
        Some(std::fs::read_to_string(&file).map_err(|e| ModelError::io(&file, e))?)
    } else {
        named_template(&config["chat_template"])
    };
    source.map(|source| ChatTemplate::new(&source, &token("bos_token"), &token("eos_token"))).transpose()
}

/// A template, or the one called `default` of several.
fn named_template(value: &Value) -> Option<String> {
    match value {
        Value::String(source) => Some(source.clone()),
        Value::Array(several) => {
            let default = several.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// The ids that end a sequence, by `generation_config.json`, else `config.json`, else the
/// tokenizer's `eos_token`; sorted.
pub(crate) fn end_ids(
    folder: &Path,
    config: &Value,
    tokenizer: &Tokenizer,
    vocab_size: usize,
) -> Result<Vec<u32>, ModelError> {
    const KEY: &str = "eos_token_id";
    let generation = read_json(folder, "generation_config.json")?.unwrap_or(Value::Null);
    let (file, value) = match (&generation[KEY], &config[KEY]) {
        (Value::Null, value) => ("config.json", value),
        (value, _) => ("generation_config.json", value),
    };
    let path = folder.join(file);
    let one = |value: &Value| match value.as_u64() {
        Some(id) if id < vocab_size as u64 => Ok(id as u32),
        _ => Err(ModelError::field(&path, KEY, format!("an id below {vocab_size}"), value)),
    };
    let mut ids = match value {
        Value::Null => {
            let config = read_json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
            let name = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str());
            name.and_then(|name| tokenizer.token_to_id(name)).into_iter().collect()
        }
        Value::Array(values) => values.iter().map(one).collect::<Result<Vec<_>, _>>()?,
        value => vec![one(value)?],
    };
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

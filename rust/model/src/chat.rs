//! Chat templates: Jinja, with the Python methods and the settings that `transformers` gives them.

use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

use crate::ModelError;

const NAME: &str = "chat";

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl ChatMessage {
    /// A turn of `role` saying `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template and the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Compiles `source`; `bos_token` and `eos_token` are variables in it.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|e| ModelError::Template(e.to_string()))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
        })
    }

    /// The template as it was written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `messages` (anything that serialises to objects with `role` and
    /// `content`), ending where the assistant speaks if `add_generation_prompt`.
    pub fn render<M: Serialize>(
        &self,
        messages: &[M],
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        let variables = context! {
            messages,
            add_generation_prompt,
            bos_token => self.bos_token,
            eos_token => self.eos_token,
        };
        let template = self.environment.get_template(NAME);
        template.and_then(|t| t.render(variables)).map_err(|e| ModelError::Template(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_trimmed_and_python_methods_work() {
        let source = "{% for m in messages %}\n    {% if m.role.upper().startswith('U') %}\n{{ m['content'].strip() }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n{{ messages[0].items() | length }}";
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        let text = template.render(&[ChatMessage::new("user", "  hi ")], false).unwrap();
        assert_eq!(text, "hi</s>\n2");
    }

    #[test]
    fn a_template_may_refuse() {
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", "", "").unwrap();
        let error = template.render(&[ChatMessage::new("user", "x")], true).unwrap_err().to_string();
        assert!(error.contains("roles must alternate"), "{error}");
        assert!(ChatTemplate::new("{% for %}", "", "").is_err());
    }
}

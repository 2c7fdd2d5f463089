//! Names of one part, `gpt2`: what the hub once called its first models, and people still type.
//!
//! The hub redirects browsers from these names; locations need both parts. This knows where those models are now, so
//! that an error can name the location that works.

/// The organisations that the first models belong to now, by how their names begin. The first that fits counts.
const MOVED: [(&str, &str); 17] = [
    ("gpt2", "openai-community"),
    ("openai-gpt", "openai-community"),
    ("roberta-", "FacebookAI"),
    ("xlm-", "FacebookAI"),
    ("bert-", "google-bert"),
    ("distilbert-", "distilbert"),
    ("distilroberta-", "distilbert"),
    ("distilgpt2", "distilbert"),
    ("t5-small", "google-t5"),
    ("t5-base", "google-t5"),
    ("t5-large", "google-t5"),
    ("t5-3b", "google-t5"),
    ("t5-11b", "google-t5"),
    ("albert-", "albert"),
    ("xlnet-", "xlnet"),
    ("camembert-base", "almanach"),
    ("transfo-xl-", "transfo-xl"),
];

/// What to write for a repository whose name was given in one part, and for what is in it.
pub(super) fn remedy(name: &str, rest: &str) -> String {
    match MOVED.iter().find(|(begin, _)| name.starts_with(begin)) {
        Some((_, organisation)) => format!("Write hf://{organisation}/{name}{rest}"),
        None if name.is_empty() => "Write hf://org/name".to_owned(),
        None => {
            format!("Write hf://ORGANISATION/{name}{rest}, with the organisation that the model's page shows")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_models_are_named_in_full() {
        assert_eq!(remedy("gpt2", ""), "Write hf://openai-community/gpt2");
        assert_eq!(remedy("xlm-roberta-base", "@main"), "Write hf://FacebookAI/xlm-roberta-base@main");
        assert_eq!(remedy("bert-base-uncased", "/x.json"), "Write hf://google-bert/bert-base-uncased/x.json");
        assert!(remedy("llama", "").contains("hf://ORGANISATION/llama"));
    }
}

//! What the hub has, and what it says about a model, without fetching it.

use super::download::{Client, Listing};
use super::http::{self, Ask, Http};
use super::settings::Settings;
use super::snapshot::Snapshots;
use super::{Event, Request, files, repo_of};
use crate::error::{Error, Kind, Result};
use serde_json::{Map, Value};

/// A model that a search found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hit {
    /// `owner/name`
    pub name: String,
    pub downloads: u64,
    pub likes: u64,
    /// Its licence must be accepted first.
    pub gated: bool,
    pub tags: Vec<String>,
    /// `architectures` of config.json, where the hub tells.
    pub architectures: Vec<String>,
}

/// What the hub says about a model.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    pub hit: Hit,
    /// The commit that `revision` is now.
    pub revision: String,
    /// The licence, as the hub names it ("apache-2.0").
    pub licence: Option<String>,
    /// Number of weights, where the hub has counted them.
    pub parameters: Option<u64>,
    /// Positions that the model was made for, by config.json.
    pub context: Option<u64>,
    pub has_template: Option<bool>,
    /// Bytes that a download fetches, where the hub tells the sizes; the error says why it cannot be run.
    pub download: Result<Option<u64>, String>,
}

/// Searches the hub for text-generation models with `words` in their name, most downloaded first.
///
/// # Errors
/// `Network` when the hub cannot be reached or refuses.
pub fn search(words: &str, limit: usize, on_event: &mut dyn FnMut(Event)) -> Result<Vec<Hit>> {
    search_with(&Settings::from_env()?, words, limit, on_event)
}

pub(super) fn search_with(settings: &Settings, words: &str, limit: usize, on_event: &mut dyn FnMut(Event)) -> Result<Vec<Hit>> {
    if settings.offline {
        return Err(Error::new(Kind::Network, "HF_HUB_OFFLINE forbids a search on the hub"));
    }
    let http = Http::new(settings)?;
    let mut url = http.url(&["api", "models"]);
    url.query_pairs_mut()
        .append_pair("search", words)
        .append_pair("filter", "text-generation")
        .append_pair("sort", "downloads")
        .append_pair("direction", "-1")
        .append_pair("limit", &limit.to_string())
        .append_pair("config", "true");
    let found: Vec<Map<String, Value>> = http::block_on(http.json(&Ask::get(url, "", "the search"), on_event))?;
    Ok(found.iter().filter_map(hit).filter(|hit| super::is_repo_id(&hit.name)).take(limit).collect())
}

/// Asks the hub about `name`; nothing is stored.
///
/// # Errors
/// As [`super::find`].
pub fn about(name: &str, on_event: &mut dyn FnMut(Event)) -> Result<About> {
    about_with(&Settings::from_env()?, name, on_event)
}

pub(super) fn about_with(settings: &Settings, name: &str, on_event: &mut dyn FnMut(Event)) -> Result<About> {
    let request = Request::parse(name);
    let repo = repo_of(request.name)?;
    if settings.offline {
        return Err(Error::not_found(format!("{repo} is not here and HF_HUB_OFFLINE forbids asking the hub"))
            .with_hint("unset HF_HUB_OFFLINE"));
    }
    let client = Client::new(settings, repo)?;
    http::block_on(async {
        let listing = client.listing(request.revision.unwrap_or("main"), on_event).await?;
        let (owner, name) = repo.split_once('/').unwrap_or((repo, ""));
        let mut config = listing.about.get("config").cloned().unwrap_or_default();
        if listing.siblings.iter().any(|s| s.rfilename == "config.json") {
            let url = client.http.url(&[owner, name, "resolve", &listing.sha, "config.json"]);
            // A gated model tells about itself but does not give this file.
            if let Ok(Value::Object(own)) = client.http.json(&Ask::get(url, repo, "config.json"), on_event).await {
                match &mut config {
                    Value::Object(config) => config.extend(own),
                    config => *config = Value::Object(own),
                }
            }
        }
        Ok(describe(repo, listing, &config))
    })
}

/// Licence in the front matter of the model card, if some tool put one into the cache.
pub fn card(name: &str) -> Option<String> {
    let settings = Settings::from_env().ok()?;
    let request = Request::parse(name);
    let snapshots = Snapshots::new(&settings.hf_cache, repo_of(request.name).ok()?);
    licence_of(&snapshots.card(request.revision.unwrap_or("main"))?)
}

fn describe(repo: &str, listing: Listing, config: &Value) -> About {
    let about = &listing.about;
    let mut hit = hit(about).unwrap_or_default();
    hit.name = repo.to_string();
    if hit.architectures.is_empty() {
        hit.architectures = strings(config.get("architectures"));
    }
    let names: Vec<String> = listing.siblings.iter().map(|s| s.rfilename.clone()).collect();
    // The index of a sharded model names all files that are called shards, which is as good as reading it.
    let shards: Vec<String> = names.iter().filter(|n| n.starts_with("model-") && n.ends_with(".safetensors")).cloned().collect();
    let download = files::select(&names, files::index(&names).map(|_| shards.as_slice())).map(|chosen| {
        let sizes = listing.siblings.iter().filter(|s| chosen.files.contains(&s.rfilename)).map(|s| s.size);
        sizes.sum::<Option<u64>>()
    });
    let text = config.get("text_config").unwrap_or(config);
    let in_config = ["/tokenizer_config/chat_template", "/chat_template_jinja"].iter().any(|at| config.pointer(at).is_some());
    let has_template = in_config || names.iter().any(|name| name.starts_with("chat_template."));
    About {
        revision: listing.sha.clone(),
        licence: about
            .get("cardData")
            .and_then(|card| card.get("license")?.as_str())
            .map(str::to_string)
            .or_else(|| hit.tags.iter().find_map(|tag| tag.strip_prefix("license:")).map(str::to_string)),
        parameters: about.get("safetensors").and_then(|counts| counts.get("total")?.as_u64()),
        context: text.get("max_position_embeddings").and_then(Value::as_u64),
        has_template: (has_template || config.get("tokenizer_config").is_some()).then_some(has_template),
        download,
        hit,
    }
}

fn hit(entry: &Map<String, Value>) -> Option<Hit> {
    let count = |key: &str| entry.get(key).and_then(Value::as_u64).unwrap_or(0);
    let name = entry.get("id").or_else(|| entry.get("modelId")).and_then(Value::as_str);
    Some(Hit {
        // The listing keeps its name apart.
        name: name.unwrap_or_default().to_string(),
        downloads: count("downloads"),
        likes: count("likes"),
        gated: entry.get("gated").is_some_and(|gated| gated.as_bool().unwrap_or(gated.is_string())),
        tags: strings(entry.get("tags")),
        architectures: strings(entry.get("config").and_then(|config| config.get("architectures"))),
    })
}

fn strings(list: Option<&Value>) -> Vec<String> {
    let items = list.and_then(Value::as_array).into_iter().flatten();
    items.filter_map(|item| item.as_str().map(str::to_string)).collect()
}

/// `license:` in the YAML front matter of a model card.
fn licence_of(card: &str) -> Option<String> {
    let mut lines = card.lines();
    lines.next().filter(|line| line.trim_end() == "---")?;
    let line = lines.take_while(|line| line.trim_end() != "---").find_map(|line| line.strip_prefix("license:"))?;
    let name = line.trim().trim_matches(['"', '\'']);
    (!name.is_empty()).then(|| name.chars().filter(|c| !c.is_control()).take(80).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_is_read_from_the_front_matter_only() {
        assert_eq!(licence_of("---\nlanguage: en\nlicense: apache-2.0\n---\ntext").as_deref(), Some("apache-2.0"));
        assert_eq!(licence_of("---\r\nlicense: \"mit\"\r\n---\r\n").as_deref(), Some("mit"));
        assert_eq!(licence_of("---\na: b\n---\nlicense: mit\n"), None);
        assert_eq!(licence_of("license: mit\n"), None);
    }
}

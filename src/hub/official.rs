//! Bundles that the makers of the CQ format publish: archives in repositories of their own, one for each width.
//!
//! A model `owner/Name` has them in `Cactus-Compute/Name`, in files whose stem ends in `-cq<bits>`, at the
//! highest version tag that readers of today know.

use super::cache::Lock;
use super::download::Client;
use super::http::{self, Ask};
use super::settings::Settings;
use super::snapshot::Snapshots;
use super::{Event, Request, is_repo_id, repo_of};
use crate::error::{Error, Kind, Result};
use std::path::PathBuf;

const OWNER: &str = "Cactus-Compute";
/// Newest version whose archives are known.
const VERSION: [u32; 3] = [2, 2, 2];
/// Ends of archives, the one to take first.
const ENDS: &[&str] = &[".zip", ".tar", ".tar.gz", ".tgz"];

/// The official bundles of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Official {
    /// `owner/name` of the repository that holds them.
    pub repo: String,
    /// The version tag, or `main`.
    pub revision: String,
    /// One archive for each width, narrow ones first.
    pub archives: Vec<Archive>,
}

/// A bundle in one file.
#[derive(Clone, Debug, PartialEq)]
pub struct Archive {
    pub file: String,
    /// Bits of a weight; not always a whole number.
    pub bits: f64,
    pub bytes: Option<u64>,
    pub sha256: Option<String>,
}

impl Official {
    /// The archive with exactly `bits` bits a weight.
    pub fn archive(&self, bits: f64) -> Option<&Archive> {
        self.archives.iter().find(|archive| archive.bits == bits)
    }
}

/// Looks for official bundles of the hub model `name`; `None` if there are none.
///
/// # Errors
/// `Network` when the hub cannot be reached or refuses.
pub fn find_official(name: &str, on_event: &mut dyn FnMut(Event)) -> Result<Option<Official>> {
    find_with(&Settings::from_env()?, name, on_event)
}

pub(super) fn find_with(settings: &Settings, name: &str, on_event: &mut dyn FnMut(Event)) -> Result<Option<Official>> {
    let Some(repo) = repository(repo_of(Request::parse(name).name)?) else { return Ok(None) };
    if settings.offline {
        return Err(Error::new(Kind::Network, "HF_HUB_OFFLINE forbids asking for official bundles"));
    }
    let client = Client::new(settings, &repo)?;
    let found = http::block_on(async {
        let revision = version(&client, on_event).await?;
        let listing = client.listing(&revision, on_event).await?;
        let mut archives: Vec<Archive> = listing.siblings.into_iter().filter_map(archive).collect();
        let rank = |archive: &Archive| ENDS.iter().position(|end| archive.file.ends_with(end));
        archives.sort_by(|a, b| a.bits.total_cmp(&b.bits).then(rank(a).cmp(&rank(b))));
        archives.dedup_by(|b, a| a.bits == b.bits);
        Ok(Official { repo: repo.clone(), revision, archives })
    });
    match found {
        Ok(official) => Ok(Some(official).filter(|official| !official.archives.is_empty())),
        Err(e) if e.kind == Kind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Downloads the archive with `bits` bits a weight, checks its SHA-256, and gives the path of the file in the
/// Hugging Face cache.
///
/// # Errors
/// `NotFound` with the widths that there are, otherwise as [`super::find`].
pub fn fetch_official(official: &Official, bits: f64, on_event: &mut dyn FnMut(Event)) -> Result<PathBuf> {
    fetch_with(&Settings::from_env()?, official, bits, on_event)
}

pub(super) fn fetch_with(
    settings: &Settings,
    official: &Official,
    bits: f64,
    on_event: &mut dyn FnMut(Event),
) -> Result<PathBuf> {
    let archive = official.archive(bits).ok_or_else(|| {
        let there: Vec<String> = official.archives.iter().map(|archive| archive.bits.to_string()).collect();
        Error::not_found(format!("{} has no bundle of {bits} bits", official.repo))
            .with_hint(format!("there are {}", there.join(", ")))
    })?;
    let snapshots = Snapshots::new(&settings.hf_cache, &official.repo);
    let _lock = Lock::take(&snapshots.lock_path(), &official.repo, on_event)?;
    let client = Client::new(settings, &official.repo)?;
    http::block_on(async {
        let listing = client.listing(&official.revision, on_event).await?;
        let place = client.place(&listing, &official.revision);
        let file = client.describe(&place, &archive.file, &listing, on_event).await?;
        let total_bytes = client.absent(std::slice::from_ref(&file), &snapshots)?;
        on_event(Event::Start { what: &archive.file, total_bytes });
        client.file(&place, &file, &snapshots, on_event).await?;
        snapshots.link(&place.commit, &archive.file, &file.etag)?;
        on_event(Event::Finish);
        Ok(snapshots.snapshot(&place.commit).join(&archive.file))
    })
}

/// The repository with the official bundles of `model`.
fn repository(model: &str) -> Option<String> {
    let name = model.split('/').next_back()?.replace('_', "-");
    let (stem, bits) = name.rsplit_once("-cq").unwrap_or((&name, ""));
    let stem = if bits.parse::<f64>().is_ok() { stem } else { &name };
    Some(format!("{OWNER}/{stem}")).filter(|repo| is_repo_id(repo))
}

/// The highest version tag that is not above [`VERSION`], or `main`.
async fn version(client: &Client<'_>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<String> {
    #[derive(serde::Deserialize)]
    struct Refs {
        #[serde(default)]
        tags: Vec<Tag>,
    }
    #[derive(serde::Deserialize)]
    struct Tag {
        name: String,
    }
    let (owner, name) = client.repo.split_once('/').unwrap_or((client.repo, ""));
    let url = client.http.url(&["api", "models", owner, name, "refs"]);
    let refs: Refs = match client.http.json(&Ask::get(url, client.repo, "the list of versions"), on_event).await {
        Ok(refs) => refs,
        // Without a list of tags there is still the main branch; a hub that is not there has neither.
        Err(e) if e.kind == Kind::NotFound => return Err(e),
        Err(_) => Refs { tags: Vec::new() },
    };
    let known = refs.tags.into_iter().filter_map(|tag| Some((number(&tag.name)?, tag.name)));
    let best = known.filter(|(number, _)| *number <= VERSION).max();
    Ok(best.map_or_else(|| "main".to_string(), |(_, name)| name))
}

/// `v2.2.1`, `2.2` or `v2` as three numbers.
fn number(tag: &str) -> Option<[u32; 3]> {
    let mut numbers = [0; 3];
    let parts: Vec<&str> = tag.strip_prefix('v').unwrap_or(tag).split('.').collect();
    if parts.len() > numbers.len() || parts.iter().any(|part| !part.bytes().all(|b| b.is_ascii_digit())) {
        return None;
    }
    for (number, part) in numbers.iter_mut().zip(parts) {
        *number = part.parse().ok()?;
    }
    Some(numbers)
}

/// A file of the listing as an archive, if it is one.
fn archive(file: super::download::Sibling) -> Option<Archive> {
    let stem = ENDS.iter().find_map(|end| file.rfilename.strip_suffix(end))?;
    let bits = stem.rsplit_once("-cq")?.1;
    let plain = !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let bits = bits.parse::<f64>().ok().filter(|_| plain)?;
    if !super::files::is_safe(&file.rfilename) {
        return None;
    }
    Some(Archive { bits, bytes: file.size, sha256: file.lfs.and_then(|lfs| lfs.sha256), file: file.rfilename })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_versions_are_read_as_documented() {
        assert_eq!(repository("google/gemma_4-E2B-it").unwrap(), "Cactus-Compute/gemma-4-E2B-it");
        assert_eq!(repository("x/Model-cq3.26").unwrap(), "Cactus-Compute/Model");
        assert_eq!(repository("x/Model-cqx").unwrap(), "Cactus-Compute/Model-cqx");
        assert_eq!((number("v2.2.1"), number("2"), number("v2.10")), (Some([2, 2, 1]), Some([2, 0, 0]), Some([2, 10, 0])));
        for bad in ["", "v", "v1.2.3.4", "v1.x", "1..2", "release", "v99999999999"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }
}

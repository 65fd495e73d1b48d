//! Which files of a folder hold text, and that text.

use super::Report;
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Longest file that is read, in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Bytes a line, on average, above which no person wrote a file.
const MAX_LINE: usize = 500;
/// Folders of what was fetched or built.
const BUILT: &[&str] = &["node_modules", "target", "__pycache__", "venv"];

/// A file that may hold text.
pub struct Found {
    pub path: PathBuf,
    /// Path from the folder, with `/`.
    pub name: String,
    /// Size and time of change: as long as they are the same, so is the file.
    pub stamp: String,
}

/// The files below `dir`, in order of their names. Hidden ones and folders of built things are left out; what a link leads
/// to is visited once.
pub fn list(dir: &Path, report: &mut Report) -> Result<Vec<Found>> {
    let meta = std::fs::metadata(dir).map_err(|e| Error::io("open", dir, &e))?;
    if !meta.is_dir() {
        return Err(Error::usage(format!("{} is no folder", dir.display())).with_hint("give the folder that holds the files"));
    }
    std::fs::read_dir(dir).map_err(|e| Error::io("read", dir, &e))?;
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    visit(dir, "", &mut seen, &mut found, report);
    Ok(found)
}

fn visit(dir: &Path, name: &str, seen: &mut HashSet<PathBuf>, found: &mut Vec<Found>, report: &mut Report) {
    if !dir.canonicalize().is_ok_and(|real| seen.insert(real)) {
        return;
    }
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) => return report.unreadable.push(format!("{name}: {e}")),
    };
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    for own in names.into_iter().filter(|own| !own.starts_with('.')) {
        let (path, name) = (dir.join(&own), if name.is_empty() { own.clone() } else { format!("{name}/{own}") });
        match std::fs::metadata(&path) {
            Err(e) => report.unreadable.push(format!("{name}: {e}")),
            Ok(meta) if meta.is_dir() && BUILT.contains(&own.as_str()) => {}
            Ok(meta) if meta.is_dir() => visit(&path, &name, seen, found, report),
            // Pipes and devices would wait or never end.
            Ok(meta) if !meta.is_file() => report.binary += 1,
            Ok(meta) if meta.len() > MAX_BYTES => report.unfit += 1,
            Ok(meta) => {
                if !path.canonicalize().is_ok_and(|real| seen.insert(real)) {
                    continue;
                }
                let time = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
                found.push(Found { path, name, stamp: format!("{} {}", meta.len(), time.as_nanos()) });
            }
        }
    }
}

/// The text of a file; `None` (and a count in the report) where there is none.
pub fn read(file: &Found, report: &mut Report) -> Option<String> {
    let bytes = match std::fs::read(&file.path) {
        Ok(bytes) => bytes,
        Err(e) => {
            report.unreadable.push(format!("{}: {e}", file.name));
            return None;
        }
    };
    if bytes.contains(&0) {
        report.binary += 1;
        return None;
    }
    let Ok(text) = String::from_utf8(bytes) else {
        report.binary += 1;
        return None;
    };
    let lower = file.name.to_ascii_lowercase();
    let is_html = lower.ends_with(".html") || lower.ends_with(".htm");
    let lines = text.lines().count().max(1);
    let prose = [".txt", ".md", ".rst"].iter().any(|end| lower.ends_with(end)) || is_html;
    if lower.contains(".min.") || (!prose && text.len() / lines > MAX_LINE) {
        report.unfit += 1;
        return None;
    }
    Some(if is_html { without_tags(&text) } else { text })
}

/// The text of an HTML page, with as many lines as it has: tags, comments, scripts and styles left out, the commonest
/// entities read.
pub fn without_tags(html: &str) -> String {
    let mut out = String::with_capacity(html.len());
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let lower = |n: usize| rest.get(..n).map(str::to_ascii_lowercase).unwrap_or_default();
        let end = if rest.starts_with("<!--") {
            rest.find("-->").map(|at| at + 3)
        } else if let Some(tag) = ["script", "style"].iter().find(|tag| lower(tag.len() + 1) == format!("<{tag}")) {
            let close = format!("</{tag}");
            let found = rest
                .char_indices()
                .map(|(at, _)| at)
                .find(|at| rest.get(*at..at + close.len()).is_some_and(|piece| piece.eq_ignore_ascii_case(&close)));
            found.and_then(|at| rest[at..].find('>').map(|end| at + end + 1))
        } else if rest[1..].starts_with(|c: char| c.is_ascii_alphabetic() || "/!?".contains(c)) {
            rest.find('>').map(|at| at + 1)
        } else {
            // No tag.
            out.push('<');
            rest = &rest[1..];
            continue;
        };
        let (tag, after) = rest.split_at(end.unwrap_or(rest.len()));
        match tag.matches('\n').count() {
            0 => out.push(' '),
            lines => out.extend(std::iter::repeat_n('\n', lines)),
        }
        rest = after;
    }
    out.push_str(rest);
    for (entity, text) in [("&nbsp;", " "), ("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")] {
        out = out.replace(entity, text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_lose_their_tags_and_keep_their_lines() {
        let page = "<h1>Stone &amp; river</h1>\n<script>\nif (a<b) {}\n</SCRIPT>a < b<!-- no\n-->\n<p\nclass='x'>end";
        let text = without_tags(page);
        assert_eq!(text.lines().map(str::trim).collect::<Vec<_>>(), ["Stone & river", "", "", "a < b", "", "", "end"]);
        for odd in ["<", "a <", "<script>", "<!--", "<é>", "</", "<scr\u{e9}"] {
            without_tags(odd);
        }
    }
}

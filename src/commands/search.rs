//! `cactus search`: the well-known models, then the hub.

use super::Outcome;
use super::terminal::{self, Terminal};
use cactus::hub::{self, Hit, catalog};
use cactus::model::families;
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Args {
    /// What to look for
    #[arg(required = true)]
    words: Vec<String>,
    /// Models from the hub at most
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=100))]
    limit: u16,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Tags of checkpoints that are quantised in a foreign way.
const FOREIGN: &[&str] =
    &["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mlx", "exl2", "exl3", "openvino", "hqq", "aqlm", "quanto"];

struct Row {
    name: String,
    alias: Option<&'static str>,
    downloads: Option<u64>,
    likes: Option<u64>,
    gated: Option<bool>,
    supported: Option<bool>,
    note: Option<&'static str>,
}

pub fn run(args: &Args) -> Outcome {
    let words = args.words.join(" ");
    let terminal = Terminal::new(false);
    let mut rows: Vec<Row> = catalog::search(&words)
        .into_iter()
        .map(|m| Row {
            name: m.repo.to_owned(),
            alias: Some(m.alias),
            downloads: None,
            likes: None,
            gated: None,
            supported: Some(true),
            note: Some(m.note),
        })
        .collect();
    let hits = hub::search(&words, args.limit.into(), &mut |event| {
        if let hub::Event::Note(text) = event {
            terminal.note(text)
        }
    });
    match hits {
        Ok(hits) => merge(&mut rows, &hits),
        Err(error) if rows.is_empty() => return Err(error.into()),
        Err(error) => terminal.note(&format!("only well-known models: {error}")),
    }
    if args.json {
        let rows: Vec<Value> = rows.iter().map(as_json).collect();
        return terminal::print(&format!("{}\n", Value::from(rows)));
    }
    if rows.is_empty() {
        terminal.note(&format!("nothing found for {words}"));
        return Ok(());
    }
    terminal::print(&table(&rows))
}

/// Adds what the hub found; a well-known model keeps its place and gets the counts.
fn merge(rows: &mut Vec<Row>, hits: &[Hit]) {
    for hit in hits {
        let known = rows.iter().position(|row| row.name == hit.name);
        let index = known.unwrap_or_else(|| {
            let (name, supported) = (hit.name.clone(), supported(hit));
            rows.push(Row { name, alias: None, downloads: None, likes: None, gated: None, supported, note: None });
            rows.len() - 1
        });
        let row = &mut rows[index];
        (row.downloads, row.likes, row.gated) = (Some(hit.downloads), Some(hit.likes), Some(hit.gated));
    }
}

/// Whether this version can run the model; `None` if the hub says too little.
fn supported(hit: &Hit) -> Option<bool> {
    let tagged = |tag: &str| hit.tags.iter().any(|have| have.eq_ignore_ascii_case(tag));
    if FOREIGN.iter().any(|tag| tagged(tag)) {
        return Some(false);
    }
    let known = families::architectures();
    if hit.architectures.is_empty() {
        return None;
    }
    Some(hit.architectures.iter().any(|name| known.contains(&name.as_str())))
}

fn as_json(row: &Row) -> Value {
    json!({
        "name": row.name, "alias": row.alias, "downloads": row.downloads, "likes": row.likes, "gated": row.gated,
        "supported": row.supported, "note": row.note,
    })
}

fn table(rows: &[Row]) -> String {
    let widest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max(5);
    let mut text = format!("{:widest$}  {:>10}  {:>6}  {:9}  {}\n", "model", "downloads", "likes", "supported", "note");
    for row in rows {
        let count = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
        let supported = match row.supported {
            Some(true) => "yes",
            Some(false) => "no",
            None => "?",
        };
        let alias = row.alias.zip(row.note).map(|(alias, note)| format!("{alias}: {note}"));
        let note = alias.unwrap_or_else(|| if row.gated == Some(true) { "gated".to_owned() } else { String::new() });
        let line = format!("{:widest$}  {:>10}  {:>6}  {supported:9}  {note}", row.name, count(row.downloads), count(row.likes));
        text += line.trim_end();
        text.push('\n');
    }
    text
}

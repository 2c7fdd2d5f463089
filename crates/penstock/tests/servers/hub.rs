//! An imitation of the Hugging Face hub: its API, its redirects to a delivery network on another port, its refusals.
//!
//! It answers as the real one does as far as clients look: `X-Repo-Commit`, `X-Linked-ETag` and `X-Linked-Size` with a
//! redirect for large files, an `ETag` and the bytes for small ones, pages of a listing linked by `Link`, and refusals
//! told by `X-Error-Code`. The delivery network has tags of its own, wants a signature, and no token.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::http::{Act, Request, Server, Source};

/// Files of at least so many bytes are on the delivery network.
pub const LARGE: usize = 4096;
/// Entries of a page of a listing.
const PAGE: usize = 2;

type Files = BTreeMap<String, Vec<u8>>;

/// One repository.
#[derive(Default, Clone)]
pub struct Repository {
    /// Commits by their name, 40 hexadecimal digits.
    pub commits: BTreeMap<String, Files>,
    /// Branches and tags.
    pub refs: BTreeMap<String, String>,
    /// Whether its conditions must be accepted.
    pub gated: bool,
    /// The token that is needed; a gated repository takes it too.
    pub token: Option<String>,
}

#[derive(Default)]
struct State {
    repositories: BTreeMap<String, Repository>,
    /// What signed URLs must carry; links with another signature have expired.
    signature: String,
}

/// The hub, its delivery network, and what was asked of them.
pub struct Hub {
    pub server: Server,
    pub network: Server,
    state: Arc<Mutex<State>>,
    seen: Arc<Mutex<Vec<String>>>,
}

pub fn commit(number: usize) -> String {
    format!("{number:040x}")
}

/// A digest of a file's content, as far as telling versions apart goes.
pub fn tag(bytes: &[u8]) -> String {
    let sum = bytes
        .iter()
        .fold(bytes.len() as u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    if bytes.len() >= LARGE { format!("{sum:064x}") } else { format!("{sum:040x}") }
}

impl Hub {
    pub fn start() -> Self {
        let (server, network) = (Server::start(Source::default()), Server::start(Source::default()));
        let state = Arc::new(Mutex::new(State { signature: "s0".into(), ..State::default() }));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (of_hub, log, elsewhere) = (Arc::clone(&state), Arc::clone(&seen), network.url(""));
        server.script(move |request, _| {
            let authorization = request.headers.get("authorization").cloned().unwrap_or_default();
            log.lock().unwrap().push(format!("hub {} {} {authorization}", request.method, request.path));
            answer(&of_hub.lock().unwrap(), request, &authorization, &elsewhere)
        });
        let (of_network, log) = (Arc::clone(&state), Arc::clone(&seen));
        network.script(move |request, _| {
            let authorization = request.headers.get("authorization").cloned().unwrap_or_default();
            log.lock().unwrap().push(format!("network {} {} {authorization}", request.method, request.path));
            let signed = request.path.ends_with(&format!("?sig={}", of_network.lock().unwrap().signature));
            if signed {
                Act::Serve
            } else {
                Act::Refuse(403, vec![], "<Error><Code>AccessDenied</Code></Error>".into())
            }
        });
        Self { server, network, state, seen }
    }

    /// Makes or changes a repository. `name` is `models/org/name` or `datasets/org/name`.
    pub fn set(&self, name: &str, change: impl FnOnce(&mut Repository)) {
        let mut state = self.state.lock().unwrap();
        let repository = state.repositories.entry(name.to_owned()).or_default();
        change(repository);
        for bytes in
            repository.commits.values().flat_map(BTreeMap::values).filter(|bytes| bytes.len() >= LARGE)
        {
            self.network.put(&format!("/{}", tag(bytes)), bytes);
        }
    }

    /// Makes a commit the newest of branch main.
    pub fn push(&self, name: &str, number: usize, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(path, bytes)| (path.to_string(), bytes.to_vec())).collect();
        self.set(name, |repository| {
            repository.commits.insert(commit(number), files);
            repository.refs.insert("main".into(), commit(number));
        });
    }

    /// Has all signed URLs that were given out expire.
    pub fn expire_links(&self) {
        static SIGNATURES: AtomicUsize = AtomicUsize::new(1);
        self.state.lock().unwrap().signature = format!("s{}", SIGNATURES.fetch_add(1, Ordering::Relaxed));
    }

    /// What was asked since the last call: who was asked, method, path, authorization.
    pub fn seen(&self) -> Vec<String> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

fn refuse(status: u16, code: &str, message: &str) -> Act {
    let headers = vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", message.to_owned())];
    Act::Refuse(status, headers, format!("{{\"error\":\"{message}\"}}"))
}

fn json(headers: Vec<(&'static str, String)>, body: String) -> Act {
    Act::Refuse(200, headers, body)
}

fn answer(state: &State, request: &Request, authorization: &str, network: &str) -> Act {
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    let path = path.replace("%2F", "\u{1}");
    let parts: Vec<_> = path
        .trim_start_matches('/')
        .split('/')
        .map(|part| part.replace('\u{1}', "/").replace("%20", " "))
        .collect();
    let parts: Vec<_> = parts.iter().map(String::as_str).collect();
    let (name, action, revision, rest) = match &parts[..] {
        ["api", kind, org, name, action, revision, rest @ ..] => {
            (format!("{kind}/{org}/{name}"), *action, *revision, rest)
        }
        ["datasets", org, name, "resolve", revision, rest @ ..] => {
            (format!("datasets/{org}/{name}"), "resolve", *revision, rest)
        }
        [org, name, "resolve", revision, rest @ ..] => {
            (format!("models/{org}/{name}"), "resolve", *revision, rest)
        }
        _ => return Act::Refuse(404, vec![], String::new()),
    };
    if name == "models/org/old-name" {
        let location = request.path.replace("org/old-name", "org/model");
        return Act::Refuse(307, vec![("Location", location)], String::new());
    }
    if !authorization.is_empty() && !authorization.starts_with("Bearer hf_") {
        return refuse(401, "", "Invalid credentials in Authorization header");
    }
    let Some(repository) = state.repositories.get(&name) else {
        let status = if authorization.is_empty() { 401 } else { 404 };
        return refuse(status, "RepoNotFound", "Repository not found");
    };
    let allowed = repository.token.as_ref().is_none_or(|token| authorization == format!("Bearer {token}"));
    let is_file = action == "resolve";
    // What a gated repository is called may be known; what is in it may not.
    if !allowed && repository.gated && is_file {
        return refuse(
            if authorization.is_empty() { 401 } else { 403 },
            "GatedRepo",
            "Access to model is restricted",
        );
    }
    if !allowed && !repository.gated {
        return refuse(
            if authorization.is_empty() { 401 } else { 404 },
            "RepoNotFound",
            "Repository not found",
        );
    }
    let sha = repository.refs.get(revision).map_or(revision, String::as_str);
    let Some(files) = repository.commits.get(sha) else {
        return refuse(404, "RevisionNotFound", &format!("Invalid rev id: {revision}"));
    };
    let rest = rest.join("/");
    match action {
        "revision" => json(vec![], format!("{{\"id\":\"{name}\",\"sha\":\"{sha}\",\"siblings\":[]}}")),
        "tree" => tree(files, &rest, query, &request.path),
        _ => file(files, &rest, sha, request, network, &state.signature),
    }
}

fn tree(files: &Files, directory: &str, query: &str, path: &str) -> Act {
    let recursive = query.contains("recursive=true");
    let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    let mut entries = BTreeMap::new();
    for (file, bytes) in files.iter().filter(|(file, _)| file.starts_with(&prefix)) {
        let below = &file[prefix.len()..];
        for (at, _) in below.match_indices('/') {
            if recursive || at == below.find('/').unwrap() {
                let directory = format!("{prefix}{}", &below[..at]);
                entries.insert(
                    directory.clone(),
                    format!("{{\"type\":\"directory\",\"oid\":\"d\",\"size\":0,\"path\":\"{directory}\"}}"),
                );
            }
        }
        if recursive || !below.contains('/') {
            let (oid, size) = (tag(bytes), bytes.len());
            let lfs = if size < LARGE {
                String::new()
            } else {
                format!(",\"lfs\":{{\"oid\":\"{oid}\",\"size\":{size},\"pointerSize\":134}}")
            };
            entries.insert(
                file.clone(),
                format!("{{\"type\":\"file\",\"oid\":\"{oid}\",\"size\":{size},\"path\":\"{file}\"{lfs}}}"),
            );
        }
    }
    if entries.is_empty() && !directory.is_empty() {
        return refuse(404, "EntryNotFound", &format!("{directory} does not exist"));
    }
    let cursor: usize = query.split("cursor=").nth(1).and_then(|cursor| cursor.parse().ok()).unwrap_or(0);
    let page: Vec<_> = entries.values().skip(cursor).take(PAGE).cloned().collect();
    let mut headers = vec![];
    if cursor + PAGE < entries.len() {
        let base = path.split("&cursor=").next().unwrap();
        headers.push(("Link", format!("<{base}&cursor={}>; rel=\"next\"", cursor + PAGE)));
    }
    json(headers, format!("[{}]", page.join(",")))
}

fn file(files: &Files, path: &str, sha: &str, request: &Request, network: &str, signature: &str) -> Act {
    let Some(bytes) = files.get(path) else {
        return refuse(404, "EntryNotFound", "Entry not found");
    };
    let (tag, size) = (tag(bytes), bytes.len());
    let mut headers = vec![("X-Repo-Commit", sha.to_owned())];
    if size >= LARGE {
        headers.push(("X-Linked-ETag", format!("\"{tag}\"")));
        headers.push(("X-Linked-Size", size.to_string()));
        headers.push(("Location", format!("{network}/{tag}?sig={signature}")));
        return Act::Refuse(302, headers, "Found. Redirecting".into());
    }
    headers.push(("ETag", format!("W/\"{tag}\"")));
    let text = String::from_utf8(bytes.clone()).unwrap();
    match request.range() {
        // The real one answers to ranges; its mirrors may not.
        Some(_) if path.starts_with("whole") => Act::Refuse(200, headers, text),
        Some((start, _)) if start >= size as u64 => Act::Refuse(416, headers, String::new()),
        Some((start, end)) => {
            let end = end.min(size as u64 - 1);
            headers.push(("Content-Range", format!("bytes {start}-{end}/{size}")));
            Act::Refuse(206, headers, text[start as usize..=end as usize].into())
        }
        None => Act::Refuse(200, headers, text),
    }
}

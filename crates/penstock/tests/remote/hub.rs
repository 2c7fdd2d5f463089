//! Repositories of the Hugging Face hub, against an imitation of it: commits that stay, a token that stays at home,
//! refusals that say what to do, and the cache that other programs filled.

use std::path::Path;

use penstock::checkpoint::Checkpoint;
use penstock::store::{Environment, RemoteStore, Store};
use penstock::{Code, ErrorKind};

use super::servers::http::{Act, Server, Source};
use super::servers::hub::{Hub, commit, tag};
use super::servers::policy;
use super::{SIZE, content, read, refused, says, soon};

struct At {
    hub: Hub,
    store: RemoteStore,
    home: tempfile::TempDir,
}

/// A hub, and a store that reaches it with these variables too.
fn at(variables: &[(&str, &str)]) -> At {
    let (hub, home) = (Hub::start(), tempfile::tempdir().unwrap());
    hub.push(
        "models/org/model",
        1,
        &[
            ("model.safetensors", &content(SIZE)),
            ("config.json", b"{}"),
            ("sub/a b.txt", b"hello"),
            ("whole.json", b"0123456789"),
        ],
    );
    hub.push("datasets/org/data", 2, &[("train.bin", &content(5000))]);
    let mut at = At { store: RemoteStore::default(), hub, home };
    at.store = at.again(variables);
    at
}

impl At {
    /// Another store that reaches the same hub.
    fn again(&self, variables: &[(&str, &str)]) -> RemoteStore {
        let endpoint = self.hub.server.url("");
        let own = [("HF_ENDPOINT", endpoint.as_str()), ("HF_HOME", self.home.path().to_str().unwrap())];
        RemoteStore::new(Environment::of(own.iter().chain(variables).copied()), policy())
    }

    /// Puts a file into the cache as huggingface_hub does.
    fn cache(&self, number: usize, path: &str, bytes: &[u8]) {
        let folder = self.home.path().join("hub/models--org--model");
        let blob = folder.join("blobs").join(tag(bytes));
        let file = folder.join("snapshots").join(commit(number)).join(path);
        for file in [&blob, &file, &folder.join("refs/main")] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        }
        std::fs::write(&blob, bytes).unwrap();
        let up = "../".repeat(path.split('/').count() + 1);
        std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(tag(bytes)), file).unwrap();
        std::fs::write(folder.join("refs/main"), commit(number)).unwrap();
    }
}

#[test]
fn a_large_file_comes_from_the_delivery_network_without_the_token() {
    let at = at(&[("HF_TOKEN", "hf_sentinel")]);
    let object = at.store.open("hf://org/model/model.safetensors").unwrap();
    assert_eq!(object.location(), format!("hf://org/model@{}/model.safetensors", commit(1)));
    assert_eq!(object.bytes(), SIZE as u64);
    let (bytes, _) = read(&*object, 0, SIZE).unwrap();
    assert!(bytes == content(SIZE));
    let seen = at.hub.seen();
    let (hub, network): (Vec<_>, Vec<_>) = seen.iter().partition(|request| request.starts_with("hub"));
    assert!(hub.iter().all(|request| request.ends_with("Bearer hf_sentinel")), "{seen:?}");
    assert!(network.iter().all(|request| !request.contains("hf_sentinel")), "{seen:?}");
    // The revision, then the file once: later ranges know where it is.
    assert_eq!((hub.len(), network.len()), (2, 2), "{seen:?}");
}

#[test]
fn many_readers_ask_the_hub_once() {
    let at = at(&[]);
    let location = format!("hf://org/model@{}/model.safetensors", commit(1));
    let opened = at.store.open(&location).unwrap();
    let object = at.store.reopen(&location, &opened.identity()).unwrap();
    at.hub.seen();
    std::thread::scope(|scope| {
        for part in 0..8 {
            let object = &object;
            scope.spawn(move || {
                let (begin, len) = (part * SIZE / 8, SIZE / 8);
                assert!(read(&**object, begin, len).unwrap().0 == content(SIZE)[begin..begin + len]);
            });
        }
    });
    let seen = at.hub.seen();
    assert_eq!(seen.iter().filter(|request| request.starts_with("hub")).count(), 1, "{seen:?}");
}

#[test]
fn a_small_file_comes_from_the_hub_itself() {
    let at = at(&[]);
    for (path, expected) in [("config.json", "{}"), ("sub/a b.txt", "hello"), ("whole.json", "0123456789")] {
        let object = at.store.open(&format!("hf://org/model/{path}")).unwrap();
        let (bytes, _) = read(&*object, 1, expected.len() - 1).unwrap();
        assert_eq!(bytes, &expected.as_bytes()[1..]);
        let again = at.store.reopen(object.location(), &object.identity()).unwrap();
        assert_eq!(read(&*again, 0, 2).unwrap().0, &expected.as_bytes()[..2]);
    }
}

#[test]
fn a_branch_is_one_commit_for_as_long_as_the_store_lives() {
    let at = at(&[]);
    let before = at.store.open("hf://org/model/config.json").unwrap();
    at.hub.push("models/org/model", 3, &[("config.json", b"[]"), ("new.json", b"1")]);
    // The same store goes on with the commit it began with: files and listings.
    assert_eq!(at.store.open("hf://org/model/config.json").unwrap().identity(), before.identity());
    let listed = at.store.list("hf://org/model").unwrap();
    assert!(listed.iter().all(|entry| entry.location.contains(&commit(1))), "moved");
    assert_eq!(refused(&at.store, "hf://org/model/new.json").kind(), ErrorKind::NotFound);
    // What was open is still that version, and can be opened again by its pinned name.
    assert_eq!(
        read(&*at.store.reopen(before.location(), &before.identity()).unwrap(), 0, 2).unwrap().0,
        b"{}"
    );
    let fresh = at.again(&[]);
    assert_eq!(read(&*fresh.open("hf://org/model/config.json").unwrap(), 0, 2).unwrap().0, b"[]");
}

#[test]
fn links_that_expire_are_asked_for_again() {
    let at = at(&[]);
    let object = at.store.open("hf://org/model/model.safetensors").unwrap();
    at.hub.expire_links();
    let (bytes, _) = read(&*object, 1_000_000, 1_000_000).unwrap();
    assert!(bytes == content(SIZE)[1_000_000..2_000_000]);
    let seen = at.hub.seen();
    assert!(seen.last().unwrap().starts_with("network"), "{seen:?}");
}

#[test]
fn another_file_under_the_same_commit_is_a_change() {
    let at = at(&[]);
    let object = at.store.open("hf://org/model/model.safetensors").unwrap();
    // Commits do not change; a proxy or a mirror may serve another all the same.
    let mut other = content(SIZE);
    other[SIZE - 1] ^= 1;
    at.hub.push("models/org/model", 1, &[("model.safetensors", &other)]);
    at.hub.expire_links();
    let error = soon(move || read(&*object, 0, SIZE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
}

#[test]
fn faults_of_the_delivery_network_are_survived() {
    let at = at(&[]);
    let object = at.store.open("hf://org/model/model.safetensors").unwrap();
    let acts = [
        Act::ResetAtOnce,
        Act::CloseAfter(700_000),
        Act::Refuse(503, vec![], "busy".into()),
        Act::ResetAfter(10_000),
    ];
    at.hub.network.script(move |_, number| acts.get(number).cloned().unwrap_or(Act::Serve));
    let (bytes, _) = soon(move || read(&*object, 0, SIZE)).unwrap();
    assert!(bytes == content(SIZE));
}

#[test]
fn a_listing_has_all_pages() {
    let at = at(&[]);
    let names = |listing: penstock::store::Listing| -> (Vec<_>, Vec<String>) {
        (listing.objects.into_iter().map(|found| (found.path, found.bytes)).collect(), listing.directories)
    };
    let (files, directories) = names(at.store.find("hf://org/model", false).unwrap());
    let expected = [("config.json", 2), ("model.safetensors", SIZE as u64), ("whole.json", 10)];
    assert_eq!(files, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
    assert_eq!(directories, ["sub"]);
    let (files, _) = names(at.store.find("hf://org/model@main/", true).unwrap());
    assert_eq!(files.len(), 4);
    let (files, _) = names(at.store.find("hf://org/model/sub", true).unwrap());
    assert_eq!(files, [("a b.txt".to_owned(), 5)]);
    let seen = at.hub.seen();
    assert!(seen.iter().any(|request| request.contains("cursor=2")), "{seen:?}");
    // What was listed is what is opened, in every way that can be compared.
    let listed = at.store.find("hf://org/model", true).unwrap();
    for found in listed.objects {
        assert_eq!(at.store.open(&found.location).unwrap().identity(), found.identity, "{}", found.path);
    }
}

#[test]
fn datasets_and_renamed_repositories_are_found() {
    let at = at(&[("HF_TOKEN", "hf_sentinel")]);
    let object = at.store.open("hf://datasets/org/data/train.bin").unwrap();
    assert!(read(&*object, 0, 5000).unwrap().0 == content(5000));
    let renamed = at.store.open("hf://org/old-name/model.safetensors").unwrap();
    assert_eq!(renamed.bytes(), SIZE as u64);
    at.store.list("hf://org/old-name").unwrap();
}

#[test]
fn refusals_are_typed_and_say_what_to_do() {
    let at = at(&[]);
    at.hub.set("models/org/model", |repository| {
        repository.refs.insert("feature/x".into(), commit(1));
    });
    at.hub.push("models/org/gated", 4, &[("model.safetensors", &content(5000))]);
    at.hub.set("models/org/gated", |repository| {
        (repository.gated, repository.token) = (true, Some("hf_good".into()));
    });
    at.hub.push("models/org/private", 5, &[("model.safetensors", &content(5000))]);
    at.hub.set("models/org/private", |repository| repository.token = Some("hf_good".into()));
    let (wrong, other) = (at.again(&[("HF_TOKEN", "nonsense")]), at.again(&[("HF_TOKEN", "hf_other")]));
    for (store, location, kind, parts) in [
        (
            &at.store,
            "hf://org/gated/model.safetensors",
            ErrorKind::Access,
            &["401", "GatedRepo", "accept its conditions", "hf auth login"][..],
        ),
        (
            &other,
            "hf://org/gated/model.safetensors",
            ErrorKind::Access,
            &["403", "GatedRepo", "credentials: HF_TOKEN", "org/gated"],
        ),
        (
            &at.store,
            "hf://org/private/model.safetensors",
            ErrorKind::NotFound,
            &["RepoNotFound", "hf auth login"],
        ),
        (
            &other,
            "hf://org/none/model.safetensors",
            ErrorKind::NotFound,
            &["404", "RepoNotFound", "Check the name"],
        ),
        (
            &wrong,
            "hf://org/model/model.safetensors",
            ErrorKind::Access,
            &["Invalid credentials", "not valid"],
        ),
        (
            &at.store,
            "hf://org/model@v9/model.safetensors",
            ErrorKind::NotFound,
            &["RevisionNotFound", "after the @"],
        ),
        (
            &at.store,
            "hf://org/model/none.safetensors",
            ErrorKind::NotFound,
            &["EntryNotFound", "Check the path"],
        ),
        (&at.store, "hf://org/model", ErrorKind::NotFound, &["names a repository, not a file"]),
        (&at.store, "hf://gpt2", ErrorKind::NotFound, &["two parts", "openai-community/gpt2"]),
        (&at.store, "hf://gpt2/model.safetensors", ErrorKind::NotFound, &["two parts", "hf://org/name"]),
    ] {
        let error = refused(store, location);
        assert_eq!(error.kind(), kind, "{error}");
        says(&error, parts);
        says(&error, &[location]);
        assert!(
            !error.to_string().contains("nonsense") && !error.to_string().contains("hf_other"),
            "{error}"
        );
    }
    let good = at.again(&[("HF_TOKEN", "hf_good")]);
    for repository in ["gated", "private"] {
        assert_eq!(good.open(&format!("hf://org/{repository}/model.safetensors")).unwrap().bytes(), 5000);
    }
    assert_eq!(at.store.open("hf://org/model@feature%2Fx/config.json").unwrap().bytes(), 2);
    assert_eq!(at.store.list("hf://org/model/none").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn the_cache_serves_what_it_holds_of_that_commit() {
    let at = at(&[]);
    at.cache(1, "model.safetensors", &content(SIZE));
    let object = at.store.open("hf://org/model/model.safetensors").unwrap();
    at.hub.seen();
    assert!(read(&*object, 0, SIZE).unwrap().0 == content(SIZE));
    object.map().unwrap();
    object.verify_unchanged().unwrap();
    assert_eq!(at.hub.seen(), Vec::<String>::new());
    // It is the version that the hub would have given, so a checkpoint opened here can be loaded from there.
    let listed = at.store.find("hf://org/model", false).unwrap().objects;
    let listed = listed.iter().find(|found| found.path == "model.safetensors").unwrap();
    assert_eq!(object.identity(), listed.identity);
    std::fs::remove_dir_all(at.home.path().join("hub")).unwrap();
    let remote = at.store.reopen(object.location(), &object.identity()).unwrap();
    assert!(read(&*remote, 0, SIZE).unwrap().0 == content(SIZE));
    // A newer commit is not what is cached.
    at.cache(1, "config.json", b"old");
    at.hub.push("models/org/model", 6, &[("config.json", b"new")]);
    let fresh = at.again(&[]);
    assert_eq!(read(&*fresh.open("hf://org/model/config.json").unwrap(), 0, 3).unwrap().0, b"new");
}

#[test]
fn offline_only_the_cache_is_asked() {
    let at = at(&[]);
    at.cache(1, "model.safetensors", &content(SIZE));
    at.cache(1, "sub/a b.txt", b"hello");
    let offline = at.again(&[("HF_HUB_OFFLINE", "1")]);
    let object = offline.open("hf://org/model/model.safetensors").unwrap();
    assert!(read(&*object, 0, SIZE).unwrap().0 == content(SIZE));
    let listed = offline.find("hf://org/model", true).unwrap().objects;
    assert_eq!(
        listed.iter().map(|found| &*found.path).collect::<Vec<_>>(),
        ["model.safetensors", "sub/a b.txt"]
    );
    for location in [
        "hf://org/model/config.json",
        "hf://org/model@v2/model.safetensors",
        "hf://org/other/model.safetensors",
    ] {
        let error = refused(&offline, location);
        assert_eq!(error.kind(), ErrorKind::NotFound);
        says(&error, &["HF_HUB_OFFLINE", "hf download", location]);
    }
    assert_eq!(offline.list("hf://org/other").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(at.hub.seen(), Vec::<String>::new());
}

#[test]
fn a_hub_that_cannot_be_reached_leaves_the_cache() {
    let at = at(&[]);
    at.cache(1, "model.safetensors", &content(SIZE));
    let store = at.again(&[("HF_ENDPOINT", "http://127.0.0.1:1")]);
    let object = store.open("hf://org/model/model.safetensors").unwrap();
    assert!(read(&*object, 0, 100).unwrap().0 == content(100));
    for location in ["hf://org/model".to_owned(), format!("hf://org/model@{}", commit(1))] {
        let listed = store.find(&location, true).unwrap().objects;
        assert_eq!(listed.iter().map(|found| &*found.path).collect::<Vec<_>>(), ["model.safetensors"]);
    }
    assert_eq!(store.list("hf://org/other").unwrap_err().kind(), ErrorKind::Storage);
    let error = refused(&store, "hf://org/other/model.safetensors");
    assert_eq!(error.kind(), ErrorKind::Storage);
    says(&error, &["no connection", "hf://org/other/model.safetensors"]);
}

#[test]
fn a_cache_that_leads_astray_is_not_followed() {
    let at = at(&[]);
    at.cache(1, "config.json", b"{}");
    std::fs::write(at.home.path().join("hub/models--org--model/refs/main"), "../../../etc").unwrap();
    let offline = at.again(&[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(refused(&offline, "hf://org/model/config.json").kind(), ErrorKind::NotFound);
    for location in
        ["hf://org/model@..%2F..%2Fx/config.json", "hf://org/model/../../secret", "hf://../../etc/passwd"]
    {
        assert_eq!(refused(&offline, location).kind(), ErrorKind::NotFound, "{location}");
    }
}

#[test]
fn a_sharded_repository_is_opened_with_its_index_and_pinned() {
    let header = |name: &str| {
        let json = format!("{{\"{name}\":{{\"dtype\":\"U8\",\"shape\":[5000],\"data_offsets\":[0,5000]}}}}");
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &content(5000)].concat()
    };
    let index = br#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;
    let (one, two) = (header("a"), header("b"));
    let files: [(&str, &[u8]); 4] = [
        ("model.safetensors.index.json", index),
        ("m-1.safetensors", &one),
        ("m-2.safetensors", &two),
        ("unet/model.safetensors", &one),
    ];
    let at = at(&[]);
    at.hub.push("models/org/sharded", 7, &files);
    for (location, tensors) in [
        ("hf://org/sharded", 2),
        ("hf://org/sharded/model.safetensors.index.json", 2),
        ("hf://org/sharded/unet", 1),
        ("hf://org/sharded/m-*.safetensors", 2),
        ("hf://org/sharded@main/m-2.safetensors", 1),
    ] {
        let opened = Checkpoint::open(std::sync::Arc::new(at.again(&[])), &[location.to_owned()]).unwrap();
        assert_eq!(opened.tensors().len(), tensors, "{location}");
        let mut bytes = vec![0; 5000];
        let range = opened.tensors()[0].range.clone();
        let object = opened.open_object(0).unwrap();
        object
            .read_into(range.start, penstock::memory::Window::from_slice(&mut bytes), &mut Default::default())
            .unwrap();
        assert!(bytes == content(5000));
    }
}

#[test]
fn a_listing_whose_pages_lead_back_is_an_error() {
    let server = Server::start(Source::default());
    server.script(|request, _| {
        if request.path.contains("/revision/") {
            return Act::Answer(format!("{{\"sha\":\"{}\"}}", commit(1)));
        }
        let next = if request.path.contains("cursor=1") { 2 } else { 1 };
        Act::Refuse(200, vec![("link", format!("<?cursor={next}>; rel=\"next\""))], "[]".into())
    });
    let endpoint = server.url("");
    let store =
        RemoteStore::new(Environment::of([("HF_ENDPOINT", &*endpoint), ("HF_HOME", "/nowhere")]), policy());
    let error = soon(move || store.list("hf://org/model").unwrap_err());
    assert_eq!(error.error_code(), Code::EndlessListing, "{error}");
    assert!(server.requests() <= 5, "{:?}", server.log());
}

#[test]
fn what_the_hub_says_twice_is_told_once() {
    let server = Server::start(Source::default());
    let words = "Invalid credentials in Authorization header";
    server.script(move |_, _| {
        Act::Refuse(401, vec![("x-error-message", words.into())], format!("{{\"error\":\"{words}\"}}"))
    });
    let endpoint = server.url("");
    let variables = [("HF_ENDPOINT", &*endpoint), ("HF_HOME", "/nowhere"), ("HF_TOKEN", "hf_SENTINEL")];
    let store = RemoteStore::new(Environment::of(variables), policy());
    let error = soon(move || store.open("hf://org/model/x.safetensors").map(drop).unwrap_err());
    assert_eq!(error.to_string().matches(words).count(), 1, "{error}");
    assert_eq!(error.error_code(), Code::Credentials);
}

//! The proxy that a request goes through: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` of an [`Environment`].
//!
//! The HTTP client would read these variables from the process whenever it is built, so it is given them instead.

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use reqwest::{ClientBuilder, NoProxy, Proxy};

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::is_doubtful_setting;
use crate::store::remote::settings::environment::Environment;

/// The proxies of an environment. Their URLs may hold passwords, so they have no `Debug` form.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Proxies {
    http: Option<Setting>,
    https: Option<Setting>,
    /// Hosts and networks that are reached without a proxy.
    except: String,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Setting {
    variable: &'static str,
    url: String,
}

impl Proxies {
    /// The proxies that `environment` names.
    ///
    /// # Errors
    /// `Config` for a proxy that is no URL.
    pub(crate) fn of(environment: &Environment) -> Result<Self> {
        let except = environment.get(&["NO_PROXY", "no_proxy"]).unwrap_or_default();
        let except: Vec<_> = except.split(',').map(str::trim).collect();
        // A server may set HTTP_PROXY for a CGI program from a header of the request: such a program must ignore it.
        if environment.get(&["REQUEST_METHOD"]).is_some() || except.contains(&"*") {
            return Ok(Self::default());
        }
        let setting = |names: [&'static str; 4]| {
            let (variable, url) =
                names.into_iter().find_map(|name| Some((name, environment.get(&[name])?)))?;
            Some(Setting { variable, url: url.trim().to_owned() })
        };
        let made = Self {
            http: setting(["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]),
            https: setting(["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
            // The client knows addresses of IPv6 without their brackets only.
            except: except
                .iter()
                .map(|host| host.trim_start_matches('[').trim_end_matches(']'))
                .collect::<Vec<_>>()
                .join(","),
        };
        made.apply(reqwest::Client::builder()).map(|_| made)
    }

    /// The client's settings, with these proxies and no others.
    pub(crate) fn apply(&self, builder: ClientBuilder) -> Result<ClientBuilder> {
        let mut builder = builder.no_proxy();
        let except = || NoProxy::from_string(&self.except);
        let made = [
            self.http.as_ref().map(|setting| (setting, Proxy::http(&setting.url))),
            self.https.as_ref().map(|setting| (setting, Proxy::https(&setting.url))),
        ];
        for (Setting { variable, url }, proxy) in made.into_iter().flatten() {
            let proxy = proxy.ok().filter(|_| !is_doubtful_setting(url) && is_uri(url)).ok_or_else(|| {
                // Not its value: a password in what is no URL cannot be told from the rest.
                Error::new(ErrorKind::Config, format!("{variable} is not the URL of a proxy")).remedy(format!(
                    "Write {variable}=http://host:port, or unset it; what is special in a user and a password is escaped \
                     (%2F for /, %3F for ?, %23 for #, %40 for @)"
                ))
            })?;
            builder = builder.proxy(proxy.no_proxy(except()));
        }
        Ok(builder)
    }

    /// The proxy through which a URL is reached, if it is: its host and port, and the variable that names it.
    pub(crate) fn for_url(&self, url: &str) -> Option<String> {
        let text =
            |setting: &Option<Setting>| setting.as_ref().map(|set| set.url.clone()).unwrap_or_default();
        let matcher =
            Matcher::builder().http(text(&self.http)).https(text(&self.https)).no(&*self.except).build();
        let url: Uri = url.parse().ok()?;
        let found = matcher.intercept(&url)?;
        let setting = if url.scheme_str() == Some("https") { &self.https } else { &self.http };
        Some(format!("{} ({})", found.uri().authority()?, setting.as_ref()?.variable))
    }
}

/// Whether the client can take it apart, with a scheme or without.
fn is_uri(url: &str) -> bool {
    match url.contains("://") {
        true => url.parse::<Uri>().is_ok(),
        false => format!("http://{url}").parse::<Uri>().is_ok(),
    }
}

impl std::fmt::Debug for Proxies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxies").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(variables: &[(&str, &str)], url: &str) -> Option<String> {
        Proxies::of(&Environment::of(variables.iter().copied())).unwrap().for_url(url)
    }

    #[test]
    fn a_proxy_is_found_by_scheme_and_host() {
        let both =
            [("HTTP_PROXY", "http://u:SENTINEL@p:1"), ("https_proxy", "q:2"), ("NO_PROXY", "a.b,10.0.0.0/8")];
        assert_eq!(through(&both, "http://h/x").as_deref(), Some("p:1 (HTTP_PROXY)"));
        assert_eq!(through(&both, "https://h/x").as_deref(), Some("q:2 (https_proxy)"));
        for excepted in ["http://a.b/", "https://c.a.b/", "http://10.1.2.3:4/"] {
            assert_eq!(through(&both, excepted), None, "{excepted}");
        }
        assert_eq!(through(&[("ALL_PROXY", "p:1")], "https://h").as_deref(), Some("p:1 (ALL_PROXY)"));
        assert_eq!(through(&[], "http://h"), None);
    }

    #[test]
    fn a_star_and_addresses_in_brackets_are_understood() {
        let proxy = ("HTTP_PROXY", "http://p:1");
        assert_eq!(through(&[proxy, ("NO_PROXY", "x, *")], "http://127.0.0.1/"), None);
        for except in ["[::1]", "::1", "x,[::1]"] {
            assert_eq!(through(&[proxy, ("NO_PROXY", except)], "http://[::1]:9/"), None, "{except}");
        }
        // Of a CGI program: the variable may come from whoever sent the request.
        assert_eq!(through(&[proxy, ("REQUEST_METHOD", "GET")], "http://h/"), None);
    }

    #[test]
    fn what_is_no_proxy_is_refused_by_name_without_its_password() {
        for url in
            ["http://u:SENTINEL@[bad", "http://u:SENT/INEL@p:1", "u:1#SENTINEL@p:1", "http://SENTINEL/x:1@p"]
        {
            let environment = Environment::of([("HTTPS_PROXY", url)]);
            let error = Proxies::of(&environment).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("HTTPS_PROXY="), "{error}");
            assert!(!error.to_string().contains("SENTINEL"), "{error}");
        }
    }
}

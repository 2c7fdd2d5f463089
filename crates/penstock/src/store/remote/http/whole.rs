//! Answers with the whole of an object to a request for a part of it, which HTTP allows.
//!
//! Some servers know no ranges at all; others forget them where a file is empty, or where they make it anew for every
//! request. Of a small object the whole is taken, and the part is cut out of it: so an index or an adapter is read from
//! any server. Of a large one, every range would cost all of it: that stays refused.

use http::header::{CONTENT_LENGTH, CONTENT_RANGE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use object_store::client::{HttpError, HttpResponse, HttpResponseBody};

use super::response_recorder::{Refusal, ResponseRecorder};

/// The most that is taken whole for a part of it.
const MOST_WHOLE: u64 = 32 << 20;

/// The answer, as one to the request for `range` where it is a whole object that is small.
pub(crate) async fn part(
    status: StatusCode,
    mut headers: HeaderMap,
    body: HttpResponseBody,
    range: Option<&HeaderValue>,
    host: &str,
) -> Result<HttpResponse, HttpError> {
    let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let (StatusCode::OK, Some((start, end)), Some(total @ ..=MOST_WHOLE)) =
        (status, range.and_then(bounds), length)
    else {
        return Ok(response(status, headers, body));
    };
    if start >= total {
        return Ok(refusal(StatusCode::RANGE_NOT_SATISFIABLE, host));
    }
    let end = end.min(total - 1);
    let whole = body.bytes().await?;
    let (from, to) =
        (usize::try_from(start).unwrap_or(usize::MAX), usize::try_from(end).unwrap_or(usize::MAX));
    // What ended early is told so by whoever counts the bytes.
    let part = if whole.len() as u64 == total { whole.slice(from..=to) } else { whole.slice(..0) };
    if let Ok(value) = HeaderValue::from_str(&format!("bytes {start}-{end}/{total}")) {
        headers.insert(CONTENT_RANGE, value);
    }
    headers.insert(CONTENT_LENGTH, HeaderValue::from(end - start + 1));
    Ok(response(StatusCode::PARTIAL_CONTENT, headers, part.into()))
}

/// An answer in the place of a server that did not know what it should have refused.
pub(crate) fn refusal(status: StatusCode, host: &str) -> HttpResponse {
    let host = host.to_owned();
    ResponseRecorder::note(|seen| {
        seen.refusal = Some(Refusal { status: status.as_u16(), host, ..Refusal::default() });
    });
    response(status, HeaderMap::new(), Vec::new().into())
}

fn response(status: StatusCode, headers: HeaderMap, body: HttpResponseBody) -> HttpResponse {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// First and last byte of a range header.
fn bounds(range: &HeaderValue) -> Option<(u64, u64)> {
    let (start, end) = range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    Some((start.parse().ok()?, end.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(status: StatusCode, length: Option<u64>, body: &'static [u8], range: &str) -> HttpResponse {
        let mut headers = HeaderMap::new();
        headers.extend(length.map(|length| (CONTENT_LENGTH, HeaderValue::from(length))));
        let range = range.parse().ok();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(part(status, headers, body.to_vec().into(), range.as_ref(), "h")).unwrap()
    }

    fn told(answer: HttpResponse) -> (u16, Option<String>, Vec<u8>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let range = answer.headers().get(CONTENT_RANGE).map(|range| range.to_str().unwrap().to_owned());
        let status = answer.status().as_u16();
        (status, range, runtime.block_on(answer.into_body().bytes()).unwrap().to_vec())
    }

    #[test]
    fn a_part_is_cut_out_of_the_whole() {
        for (asked, range, bytes) in [
            ("bytes=0-3", "bytes 0-3/6", &b"abcd"[..]),
            ("bytes=2-99", "bytes 2-5/6", b"cdef"),
            ("bytes=5-5", "bytes 5-5/6", b"f"),
        ] {
            let answer = told(answered(StatusCode::OK, Some(6), b"abcdef", asked));
            assert_eq!(answer, (206, Some(range.to_owned()), bytes.to_vec()));
        }
        assert_eq!(told(answered(StatusCode::OK, Some(6), b"abcdef", "bytes=6-9")).0, 416);
        assert_eq!(told(answered(StatusCode::OK, Some(0), b"", "bytes=0-9")).0, 416);
    }

    #[test]
    fn what_is_no_whole_object_or_a_large_one_is_left_as_it_is() {
        for (status, length) in
            [(206, Some(6)), (404, Some(6)), (200, None), (200, Some(MOST_WHOLE + 1)), (204, Some(6))]
        {
            let status = StatusCode::from_u16(status).unwrap();
            let answer = told(answered(status, length, b"abcdef", "bytes=0-3"));
            assert_eq!(answer, (status.as_u16(), None, b"abcdef".to_vec()), "{status} {length:?}");
        }
    }

    #[test]
    fn a_whole_that_ended_early_brings_nothing() {
        let answer = answered(StatusCode::OK, Some(9), b"abcdef", "bytes=0-3");
        assert_eq!(told(answer), (206, Some("bytes 0-3/9".into()), Vec::new()));
    }
}

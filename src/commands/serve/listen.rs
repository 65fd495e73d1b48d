//! Connections: taken as they come, limited in number, ended in good order.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Time to send the head of a request, also between two requests of a connection.
const HEAD: Duration = Duration::from_secs(60);
/// Connections at a time.
const CONNECTIONS: usize = 1024;

/// Answers until `stop` says so, and then finishes what was begun.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            place = places.clone().acquire_owned() => place,
        };
        let stream = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // Too many open files, or a caller that left again: others may still be served.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let _ = stream.set_nodelay(true);
        let (router, mut stop) = (router.clone(), stop.clone());
        tokio::spawn(async move {
            let _place = place;
            let service = TowerToHyperService::new(router);
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD);
            let connection = http.serve_connection(TokioIo::new(stream), service);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                // A connection that breaks is the caller's affair.
                _ = connection.as_mut() => return,
                _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
    }
    drop(listener);
    // All places are free again when the last connection has ended.
    let _ = places.acquire_many(CONNECTIONS as u32).await;
}

#include "server/ops/http.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include <civetweb.h>

#include "server/ops/statusz.h"

namespace fp8kvd::ops {
namespace {

// Prometheus wants the version; browsers and people take it as text.
constexpr char kText[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kJson[] = "application/json";
// The page may run its own script and ask its own server: nothing else comes in or goes out.
constexpr char kHtml[] =
    "text/html; charset=utf-8\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'";

int Send(mg_connection* connection, int code, const char* reason, const char* type,
         const std::string& text) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nX-Content-Type-Options: nosniff\r\n"
            "Content-Length: %zu\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
            code, reason, type, text.size());
  mg_write(connection, text.data(), text.size());
  return code;
}

int SendIf(bool good, mg_connection* connection, const std::string& text) {
  return good ? Send(connection, 200, "OK", kText, text)
              : Send(connection, 503, "Service Unavailable", kText, text);
}

const HttpPages& PagesOf(void* server) { return static_cast<HttpServer*>(server)->pages(); }

int OnLive(mg_connection* connection, void* server) {
  const bool is_stalled = PagesOf(server).is_stalled();
  return SendIf(
      !is_stalled, connection,
      is_stalled ? "stalled: work waits and none was finished for a minute\n" : "alive\n");
}

int OnReady(mg_connection* connection, void* server) {
  const Readiness& readiness = *PagesOf(server).readiness;
  return SendIf(readiness.is_ready(), connection, absl::StrCat(readiness.Why(), "\n"));
}

int OnMetrics(mg_connection* connection, void* server) {
  return Send(connection, 200, "OK", kText, PagesOf(server).metrics());
}

int OnStatus(mg_connection* connection, void*) {
  return Send(connection, 200, "OK", kHtml, kStatusPage);
}

int OnStatusJson(mg_connection* connection, void* server) {
  return Send(connection, 200, "OK", kJson, PagesOf(server).status_json());
}

int OnOther(mg_connection* connection, void*) {
  return Send(connection, 404, "Not Found", kText,
              "here are /livez /readyz /metrics /statusz /statusz.json\n");
}

// Where a process of this machine reaches who listens on the address.
std::string LocalHostOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string host = colon == std::string::npos ? "" : address.substr(0, colon);
  if (host.empty() || host == "0.0.0.0") return "127.0.0.1";
  if (host == "[::]") return "::1";
  return host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

// Connects and goes away.
void Knock(const std::string& host, int port) {
  char error[256];
  mg_connection* const connection =
      mg_connect_client(host.c_str(), port, /*use_ssl=*/0, error, sizeof(error));
  if (connection != nullptr) mg_close_connection(connection);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              HttpPages pages) {
  std::unique_ptr<HttpServer> self(new HttpServer(LocalHostOf(address), std::move(pages)));
  // A connection that sends nothing holds a thread until its time is over, and probes must not wait
  // for it as long as their own patience is, which is a second.
  const char* options[] = {"listening_ports",
                           address.c_str(),
                           "num_threads",
                           "8",
                           "request_timeout_ms",
                           "1000",
                           "enable_directory_listing",
                           "no",
                           "enable_keep_alive",
                           "no",
                           nullptr};
  const mg_callbacks callbacks{};
  self->context_ = mg_start(&callbacks, self.get(), options);
  if (self->context_ == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address,
        " for HTTP: it is taken by another process, or not an address of this machine; "
        "stop that process or set http_address (port 0 takes a free one, empty: none)"));
  }
  mg_set_request_handler(self->context_, "**", OnOther, self.get());
  mg_set_request_handler(self->context_, "/livez", OnLive, self.get());
  mg_set_request_handler(self->context_, "/readyz", OnReady, self.get());
  mg_set_request_handler(self->context_, "/metrics", OnMetrics, self.get());
  mg_set_request_handler(self->context_, "/statusz", OnStatus, self.get());
  mg_set_request_handler(self->context_, "/statusz.json", OnStatusJson, self.get());
  return self;
}

HttpServer::~HttpServer() {
  if (context_ == nullptr) return;
  // civetweb looks for its end when a connection comes, or every two seconds: so one comes.
  const int port = this->port();
  std::atomic<bool> has_stopped{false};
  std::thread stopper([&] {
    mg_stop(context_);
    has_stopped = true;
  });
  while (!has_stopped) {
    Knock(host_, port);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stopper.join();
}

int HttpServer::port() const {
  mg_server_port port{};
  return mg_get_server_ports(context_, 1, &port) == 1 ? port.port : 0;
}

}  // namespace fp8kvd::ops

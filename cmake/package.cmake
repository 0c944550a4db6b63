# `cpack -G DEB` in the build folder makes fp8kvd_VERSION_ARCH.deb: both programs, the systemd unit
# and its user, the example configuration and the operator's documents. apt finds the libraries that
# it names.
if(NOT FP8KVD_SERVER)
  return()
endif()
set(doc share/doc/fp8kvd)
install(TARGETS fp8kvd fp8kvctl RUNTIME DESTINATION bin COMPONENT fp8kvd)
install(FILES deploy/fp8kvd.service DESTINATION /lib/systemd/system COMPONENT fp8kvd)
install(FILES deploy/debian/fp8kvd.sysusers DESTINATION lib/sysusers.d RENAME fp8kvd.conf
  COMPONENT fp8kvd)
install(FILES deploy/example.textproto DESTINATION /etc/fp8kvd RENAME fp8kvd.textproto
  COMPONENT fp8kvd)
install(FILES docs/operations.md docs/semantics.md DESTINATION ${doc} COMPONENT fp8kvd)
install(FILES deploy/prometheus/alerts.yaml deploy/grafana/fp8kvd.json DESTINATION ${doc}/examples
  COMPONENT fp8kvd)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME fp8kvd)
set(CPACK_PACKAGE_VENDOR fp8kvd)
set(CPACK_PACKAGE_CONTACT "fp8kvd maintainers <maintainers@fp8kvd.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "decode attention over a KV cache that the daemon owns")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};fp8kvd;fp8kvd;/")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # dpkg-shlibdeps, of dpkg-dev
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/deploy/debian/conffiles
  ${CMAKE_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_SOURCE_DIR}/deploy/debian/prerm
  ${CMAKE_SOURCE_DIR}/deploy/debian/postrm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
